"""An exponential moving average of the weights, to validate and to generate with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ftk.model_parallel.shards import canonical_name, fused_parameters, local, locals_of, with_fused
from ftk.optim.config import EMAConfig


class EMA:
    """average = decay * average + (1 - decay) * weights, in fp32 whatever the weights are (Polyak and Juditsky 1992).

    Only trained parameters are averaged: frozen ones do not move, and buffers are no weights. A tied parameter is
    averaged once, under its first name. One that is frozen or thawed later is not noticed.

    Args:
        model: with the weights that the average begins with.
        config: how long it remembers; a decay of 0 makes the average the weights.
    """

    def __init__(self, model: nn.Module, config: EMAConfig) -> None:
        self.config = config
        self.parameters = {
            canonical_name(name, model): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        fused = fused_parameters(model)
        self.averages = {
            name: with_fused(p.detach().to(torch.float32, copy=True), fused.get(id(p)))
            for name, p in self.parameters.items()
        }
        self._swapped = False

    @torch.no_grad()
    def update(self, num_updates: int, skip: Tensor | None = None) -> None:
        """Take the weights into the average, if it is their turn. The host waits for nothing.

        Args:
            num_updates: updates done, the last one included.
            skip: 0-d bool, true where that one was skipped: the average stays as it is, to the bit.
        """
        assert not self._swapped, "the weights are the average's now"
        if num_updates % self.config.ema_interval:
            return
        rate = 1.0 - self.config.decay_at(num_updates)
        averages, weights = locals_of(self.averages.values()), [local(p).float() for p in self.parameters.values()]
        if skip is None or skip.device.type == "cpu":  # where reading it costs nothing
            if skip is None or not bool(skip):
                torch._foreach_lerp_(averages, weights, rate)
        else:
            _lerp(averages, weights, (~skip).float() * rate)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model computes with the average; afterwards it has its own weights back, bit for bit."""
        assert not self._swapped, "the weights are the average's already"
        with torch.no_grad():
            parameters = locals_of(self.parameters.values())
            copies = [parameter.clone() for parameter in parameters]
            torch._foreach_copy_(parameters, locals_of(self.averages.values()))
        self._swapped = True
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, copies)
            self._swapped = False

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by their parameters' names: the tensors themselves, which may be read into."""
        return dict(self.averages)


_CHUNK_ELEMENTS = 1 << 24
"""Elements of the tensors whose differences are in memory at once."""


def _lerp(averages: list[Tensor], weights: list[Tensor], rate: Tensor) -> None:
    """average += rate * (weight - average), in place, in three launches for many tensors; 0-d `rate` on the device.

    `torch._foreach_lerp_` takes such a rate for one tensor after the other.
    """
    first = size = 0
    for end, average in enumerate(averages, start=1):
        size += average.numel()
        if size < _CHUNK_ELEMENTS and end < len(averages):
            continue
        steps = torch._foreach_sub(weights[first:end], averages[first:end])
        torch._foreach_mul_(steps, rate)
        torch._foreach_add_(averages[first:end], steps)
        first, size = end, 0
