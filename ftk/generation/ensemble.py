"""Several models as one: the mean of their probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.modules.attention import Attend


class Ensemble(nn.Module):
    """Models that are decoded together; the probability of a token is the mean of what they say.

    It is decoded like one: hidden states stand side by side, [..., H1 + H2 + ...], each member's layers
    change their own part, and its logits are the logarithms of the mean probabilities. So every member has keys and
    values of its own in the decoder, and searches, processors and scoring know nothing of it.

    Args:
        models: two or more that read the same tokens. Depth and hidden size may differ.

    Raises:
        UserError: they differ in vocabulary, kind of positions or number of attention heads.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        if not models:
            raise UserError("an ensemble needs a model; give one or more")
        self.members = nn.ModuleList(models)
        configs: list[Any] = [model.config for model in models]
        # The decoder writes the keys of all layers to the same places, which depend on the number of heads.
        for name in ("vocab_size", "block_positions", "num_attention_heads"):
            values = [getattr(config, name) for config in configs]
            if len(set(values)) > 1:
                shown = ", ".join(map(str, values))
                raise UserError(f"models of an ensemble differ in {name}: {shown}; leave out those that do not fit")
        self.config = SimpleNamespace(
            vocab_size=configs[0].vocab_size,
            block_positions=configs[0].block_positions,
            max_positions=min(config.max_positions for config in configs),
        )
        sizes = [config.hidden_size for config in configs]
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        self._parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        members: list[Any] = list(models)
        self.layers = nn.ModuleList(
            _PartLayer(layer, part) for model, part in zip(members, self._parts, strict=True) for layer in model.layers
        )
        self.train(any(model.training for model in models))  # a new module is in training, whatever its parts are in

    def embed(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """tokens [B, T], others as the members' -> [B, T, H1 + H2 + ...]"""
        members: list[Any] = list(self.members)
        return torch.cat([model.embed(tokens, **inputs) for model in members], dim=-1)

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [..., H1 + H2 + ...] -> the same shape"""
        members: list[Any] = list(self.members)
        parts = zip(members, self._parts, strict=True)
        return torch.cat([model.finish(hidden[..., part]) for model, part in parts], dim=-1)

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..., H1 + H2 + ...] -> float32 [..., V], logarithms of the mean probabilities"""
        members: list[Any] = list(self.members)
        logprobs = [
            model.head(hidden[..., part]).float().log_softmax(-1)
            for model, part in zip(members, self._parts, strict=True)
        ]
        return torch.stack(logprobs).logsumexp(0) - math.log(len(logprobs))


class _PartLayer(nn.Module):
    """A member's layer, on its part of the hidden states."""

    def __init__(self, layer: nn.Module, part: slice) -> None:
        super().__init__()
        self.layer = layer
        self.part = part

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H1 + H2 + ...] -> the same shape"""
        before, own, behind = hidden[..., : self.part.start], hidden[..., self.part], hidden[..., self.part.stop :]
        return torch.cat((before, self.layer(own, attend), behind), dim=-1)
