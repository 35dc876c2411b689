"""Several models as one: the mean of their probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.generation.engine.around import wraps_of
from ftk.models.base import windows_of
from ftk.modules.attention import Attend, CrossAttend, KeysAndValues, Memory


class Ensemble(nn.Module):
    """Models that are decoded together; the probability of a token is the mean of theirs.

    It is decoded like one: hidden states stand side by side, [..., H1 + H2 + ...], each member's layers
    change their own part, and its logits are the logarithms of the mean probabilities. So every member has keys and
    values of its own in the decoder; searches, processors and scoring see one model.

    Args:
        models: two or more that read the same tokens. Depth and hidden size may differ.

    Raises:
        UserError: they differ in vocabulary, number of attention heads, what a decoder starts with or what a model
            reads in front of a prompt, or only some have an encoder.
    """

    members: Any

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        if not models:
            raise UserError("an ensemble needs a model; give one or more")
        self.members = nn.ModuleList(models)
        configs: list[Any] = [model.config for model in models]
        # The decoder writes the keys of all layers to the same places, which depend on the number of heads.
        alike = "vocab_size", "source_vocab_size", "num_attention_heads", "num_kv_heads"
        of_prompts = "decoder_start_token", "forced_first_token", "prompt_length", "sees_prompt"
        for name in (*alike, *of_prompts):
            check_alike(configs, name)
        if len({hasattr(model, "encode") for model in models}) > 1:
            raise UserError("some models of the ensemble are encoder-decoders and others are not; leave out the others")
        if hasattr(models[0], "encode"):
            self.encode = self._encode
        max_positions = min(config.max_positions for config in configs)
        windows = [window for config in configs for window in windows_of(config)]
        own: dict[str, Any] = {"max_positions": max_positions, "layer_windows": windows}
        if hasattr(configs[0], "position_limit"):
            limits = [config.position_limit for config in configs if config.position_limit]
            own["position_limit"] = min(limits, default=None)
        own["end_tokens"] = [token for config in configs for token in getattr(config, "end_tokens", ())]
        self.config = _Config(**own, members=configs)
        self._parts = _parts([config.hidden_size for config in configs])
        self._head_parts = _parts([getattr(config, "embedding_size", config.hidden_size) for config in configs])
        self.layers = nn.ModuleList(
            _PartLayer(layer, part, number, getattr(model, "around_cross", None))
            for number, (model, part) in enumerate(zip(self.members, self._parts, strict=True))
            for layer in model.layers
        )
        self.train(any(model.training for model in models))  # a new module is in training, whatever its parts are in

    def hidden_states(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """tokens [B, T], others as the members' -> what `head` reads, [B, T, W1 + W2 + ...]"""
        return torch.cat([model.hidden_states(tokens, **inputs) for model in self.members], dim=-1)

    def embed(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """tokens [B, T], others as the members' -> [B, T, H1 + H2 + ...]"""
        return torch.cat([model.embed(tokens, **inputs) for model in self.members], dim=-1)

    def around(self, **positions: Any) -> Callable[[Attend], _MembersAttend]:
        """What each member puts around its attention, which its layers pick out; arguments as the members'."""
        wraps = tuple(wraps_of(model, positions, positions.get("key_positions")) for model in self.members)
        return lambda attend: _MembersAttend(attend, wraps)

    def _encode(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """`encode` of encoder-decoders: tokens [B, S], lengths [B] or None -> [B, S, H1 + H2 + ...]"""
        return torch.cat([model.encode(tokens, lengths) for model in self.members], dim=-1)

    def around_cross(self, attend: Attend) -> Attend:
        """As it is: each member's layers put their own around it."""
        return attend

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [..., H1 + H2 + ...] -> what `head` reads, [..., W1 + W2 + ...]"""
        parts = zip(self.members, self._parts, strict=True)
        return torch.cat([model.finish(hidden[..., part]) for model, part in parts], dim=-1)

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..., W1 + W2 + ...] -> float32 [..., V], logarithms of the mean probabilities"""
        logprobs = [
            model.head(hidden[..., part]).float().log_softmax(-1)
            for model, part in zip(self.members, self._head_parts, strict=True)
        ]
        return torch.stack(logprobs).logsumexp(0) - math.log(len(logprobs))


class _Config(SimpleNamespace):
    """Options of the first member, except those that depend on all of them."""

    members: Sequence[Any] = ()

    def __getattr__(self, name: str) -> Any:
        if not self.members:  # while a copy is made
            raise AttributeError(name)
        return getattr(self.members[0], name)


def _parts(sizes: Sequence[int]) -> list[slice]:
    """Where each of some tensors of these widths is, side by side."""
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


class _PartLayer(nn.Module):
    """A member's layer, on its part of the hidden states."""

    def __init__(
        self, layer: nn.Module, part: slice, member: int, around_cross: Callable[[Attend], Attend] | None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.part = part
        self.member = member
        self.around_cross = around_cross

    def forward(self, hidden: Tensor, attend: _MembersAttend | CrossAttend) -> Tensor:
        """hidden [B, T, H1 + H2 + ...] -> the same shape"""
        before, own, behind = hidden[..., : self.part.start], hidden[..., self.part], hidden[..., self.part.stop :]
        return torch.cat((before, self.layer(own, self._own(attend)), behind), dim=-1)

    def _own(self, attend: Any) -> Any:
        """What the member puts around it, and its part of the encoders' states."""
        if not isinstance(attend, CrossAttend):
            return attend.wraps[self.member](attend.attend)
        assert self.around_cross is not None, "all members have encoders"
        memory = _PartMemory(attend.memory, self.part)
        return CrossAttend(self._own(attend.self_attend), self.around_cross(attend.cross_attend), memory)


class _PartMemory(NamedTuple):
    """A member's part of the encoders' states."""

    memory: Memory
    part: slice

    def read(self, project: KeysAndValues) -> tuple[Tensor, Tensor]:
        return self.memory.read(lambda states: project(states[..., self.part]))


class _MembersAttend(NamedTuple):
    """An `attend` that each member wraps in its own way."""

    attend: Attend
    wraps: tuple[Callable[[Attend], Attend], ...]


def check_alike(configs: Sequence[Any], name: str) -> None:
    """Raises UserError if the configs of an ensemble's models differ in an option; one without it has None."""
    values = [getattr(config, name, None) for config in configs]
    if len(set(values)) > 1:
        shown = ", ".join(map(str, values))
        raise UserError(f"models of an ensemble differ in {name}: {shown}; leave out those that do not fit")
