"""How a decoder takes a step: where one token of each hypothesis goes, and what it attends to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ftk.modules.attention import Attend, Front
from ftk.modules.kv_cache import KeyValueCache
from ftk.modules.masked_attention import step_attention


@dataclass
class Pointers:
    """Where a step of R rows reads and writes, and how far that moves from step to step (not at all in rows that
    write no answer, so that these overwrite one place again and again)."""

    num_rows: int
    places: Tensor | None  # [R A W], see `KeyValueCache.step_index`; None for a model without layers
    marks: Tensor  # [R W]: into the mask, what each hypothesis writes and is to see
    inputs: dict[str, Tensor]  # [R, .., W]
    places_step: Tensor  # [R A W]
    marks_step: Tensor  # [R W]
    strides: dict[str, Tensor]  # [R, .., W]
    key_positions: Tensor | None  # [R, capacity]: of the token in each slot; None for a model without a window or bias
    crosses: Sequence[Callable[[Attend], Any]]  # of each layer, for the attention to the source
    source_length: int  # slots of the sources that are looked at; 0 without

    def take(self, other: Pointers) -> None:
        """Become what another is, in place."""
        assert self.inputs.keys() == other.inputs.keys(), "a framing names the same inputs for all frames"
        for own, new in zip(self._tensors(), other._tensors(), strict=True):
            own.copy_(new)
        self.crosses, self.source_length = other.crosses, other.source_length

    def _tensors(self) -> list[Tensor]:
        alone = (self.places, self.marks, self.places_step, self.marks_step, self.key_positions)
        return [*(tensor for tensor in alone if tensor is not None), *self.inputs.values(), *self.strides.values()]

    def within(self, window: int | None, mask: Tensor | None, length: int) -> Tensor | None:
        """What each hypothesis sees of the first S slots, [R, 1, W, S], without what is too far from it."""
        if window is None:
            return mask
        assert mask is not None
        assert self.key_positions is not None
        first_seen = self.inputs["position_ids"] - window + 1  # [R, W]
        too_early = self.key_positions[:, None, None, :length] < first_seen[:, None, :, None]
        return mask.masked_fill(too_early, float("-inf"))

    def attend(
        self, cache: KeyValueCache, masks: Mapping[int | None, Tensor | None], length: int, window: int | None
    ) -> Attend:
        """That of a layer with this cache and window."""
        return StepAttention(cache, self.places, masks[window], length)

    def advance(self) -> None:
        """On to the next step, in place."""
        if self.places is not None:
            self.places.add_(self.places_step)
            self.marks.add_(self.marks_step)
        for name, stride in self.strides.items():
            self.inputs[name].add_(stride)


class StepAttention(NamedTuple):
    """`attend` for one token of each hypothesis: the W of a row stand side by side as queries over its one buffer."""

    cache: KeyValueCache
    places: Tensor | None  # [R A W]
    mask: Tensor | None  # [R, 1, W, S], added to the scores; None where all is seen
    length: int  # S
    front: Front | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """query [R, A, W, D], key, value [R, K, W, D] -> [R, A, W, D]"""
        assert self.places is not None, "there are layers"
        self.cache.write(key, value, self.places)
        keys, values = self.cache.read(query.size(0), self.length)  # [R, K, S, D]
        return step_attention(query, keys, values, self.mask, bias=bias, scale=scale, front=self.front)
