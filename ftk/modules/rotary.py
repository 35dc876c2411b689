"""Rotary positions: queries and keys are rotated by angles proportional to their positions (Su et al. 2021)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ftk.modules.attention import Attend


class Rope(NamedTuple):
    """The angle per position of each pair of dimensions.

    Attributes:
        theta: base of the wavelengths.
        size: R, number of leading dimensions of a head that are rotated; the others stay as they are.
        interleaved: pairs are (2i, 2i + 1); else (i, i + R/2).
        scaling: "none", "linear", "llama3" (Dubey et al. 2024) or "yarn" (Peng et al. 2023), for texts longer than
            those of the pretraining; "dynamic" is "none" up to their length, beyond which these angles are not for.
        factor: how much longer.
        original_positions: longest text of the pretraining; for "llama3" and "yarn".
        low, high: pairs that make fewer than `low` turns within `original_positions` are stretched by `factor`, those
            that make more than `high` are not, and those between are interpolated; usually 1 and 4 for "llama3", 1 and
            32 for "yarn".
        attention_factor: of cosines and sines under "yarn"; None: 0.1 ln(factor) + 1.
        whole_pairs: whether "yarn" rounds the range of the pairs that are interpolated to whole ones.
        half: whether the frequencies are rounded to float16, as code that keeps them in that type has them.
    """

    theta: float
    size: int
    interleaved: bool = False
    scaling: str = "none"
    factor: float = 1.0
    original_positions: int = 0
    low: float = 1.0
    high: float = 4.0
    attention_factor: float | None = None
    whole_pairs: bool = True
    half: bool = False

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Radians per place of each pair, float32 [R/2]."""
        exponents = torch.arange(0, self.size, 2, dtype=torch.int64, device=device).float() / self.size
        frequencies = 1.0 / self.theta**exponents
        if self.half:
            frequencies = frequencies.half().float()
        if self.scaling == "linear":
            return frequencies / self.factor
        if self.scaling == "llama3":
            wavelengths = 2 * math.pi / frequencies
            turns = self.original_positions / wavelengths
            share = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
            blended = (1 - share) * frequencies / self.factor + share * frequencies
            slow = torch.where(wavelengths > self.original_positions / self.low, frequencies / self.factor, blended)
            return torch.where(wavelengths < self.original_positions / self.high, frequencies, slow)
        if self.scaling == "yarn":
            first, last = (self._pair_with_turns(turns) for turns in (self.high, self.low))
            if self.whole_pairs:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, self.size - 1)
            last = last + 0.001 if first == last else last
            places = torch.arange(self.size // 2, dtype=torch.float32, device=device)
            kept = 1 - ((places - first) / (last - first)).clamp(0, 1)
            return frequencies / self.factor * (1 - kept) + frequencies * kept
        return frequencies

    def tables(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles at some places.

        Args:
            position_ids: int64 [B, T], or [B, P, T] where each of P equal parts of a head has its own.

        Returns:
            two of [B, 1, T, R/2] or [B, 1, T, P, R/2], float32: bfloat16 cannot tell places beyond 256 apart.
        """
        positions = position_ids if position_ids.dim() == 2 else position_ids.transpose(1, 2)  # [B, T] or [B, T, P]
        angles = positions[:, None, ..., None].float() * self.frequencies(position_ids.device)
        scale = self.attention_factor if self.attention_factor is not None else 1.0
        if self.scaling == "yarn" and self.attention_factor is None:
            scale = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return angles.cos() * scale, angles.sin() * scale

    def _pair_with_turns(self, turns: float) -> float:
        """Index of the pair that makes this number of turns within `original_positions`, as a real number."""
        return self.size * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


class RotaryAttention(NamedTuple):
    """An `Attend` that rotates queries and keys, then calls another one; a cache holds rotated keys."""

    attend: Attend
    cos: Tensor
    sin: Tensor
    interleaved: bool

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        query, key = (rotate(tensor, self.cos, self.sin, self.interleaved) for tensor in (query, key))
        return self.attend(query, key, value, bias=bias, scale=scale)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turns the leading R dimensions of queries or keys, or of each of P parts of them.

    Args:
        heads: [B, A, T, D].
        cos, sin: [B, 1, T, R/2] or [B, 1, T, P, R/2].
        interleaved: see `Rope`.
    """
    if cos.dim() > heads.dim():
        return rotate(heads.unflatten(-1, (cos.size(-2), -1)), cos, sin, interleaved).flatten(-2)
    size = 2 * cos.size(-1)
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    rotated = heads if size == heads.size(-1) else heads[..., :size]
    if interleaved:
        first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1)  # [B, A, T, R/2] each
        result = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        result = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return result if size == heads.size(-1) else torch.cat((result, heads[..., size:]), dim=-1)
