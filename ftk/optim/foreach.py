"""What the optimizers written here share: multi-tensor updates in chunks, which the device can skip."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftk.model_parallel.shards import local, locals_of
from ftk.optim.base import OptimizerConfig, defaults_of

# Temporaries of an update are as large as what is updated at once: this many elements. On a CPU they had better stay
# in the cache (LAMB's step of 10 M parameters: 65 ms, against 155 in chunks of 1 << 24); elsewhere few launches count.
_CHUNK_ELEMENTS = {"cpu": 1 << 20}
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 24

State = dict[str, Tensor]


class Chunk(NamedTuple):
    """Parameters that are updated at once, as lists of one length, none empty.

    Of what is shared out over processes (DTensors) the first three hold this process's parts, plain tensors.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[State]
    wholes: list[Any]  # the parameters themselves, for what depends on more than one element

    def entries(self, name: str) -> list[Tensor]:
        """One entry of each state."""
        return [state[name] for state in self.states]


class ForeachOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer whose update is a few foreach operations, and which honours `found_inf` without a host wait.

    `found_inf` (0-d, on the device of the gradients; see `ftk.optim.base.step_unless`) is read by the host
    where that costs nothing, on the CPU. Elsewhere the update is made and, where `found_inf` is set, undone by
    the device: parameters and state are bit for bit what they were, whatever the gradients held.

    Args:
        config: the options of groups that have none of their own.
        param_groups: as from `ftk.optim.parameter_groups`; a group's own options win.
    """

    _step_supports_amp_scaling = True

    def __init__(self, config: OptimizerConfig, param_groups: list[dict[str, Any]]) -> None:
        # "capturable" is torch's word for a step count that lives on the device; checkpoints place it by that.
        super().__init__(param_groups, {**defaults_of(config), "capturable": True})

    @abstractmethod
    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        """The state of a parameter before its first update; the same entries for each parameter of one shape."""

    @abstractmethod
    def update(self, group: dict[str, Any], chunk: Chunk) -> None:
        """Change parameters and their states in place, with the options of their group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: computes the loss anew, with gradients; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and _read_without_waiting(found_inf):
            if bool(found_inf):
                return loss
            found_inf = None
        unscale(self.param_groups, getattr(self, "grad_scale", None))
        for group in self.param_groups:
            for parameters in _chunks([p for p in group["params"] if p.grad is not None]):
                self._update_unless(found_inf, group, parameters)
        return loss

    def _update_unless(self, found_inf: Tensor | None, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = self.new_state(parameter, group)
        states = [{name: local(value) for name, value in self.state[parameter].items()} for parameter in parameters]
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        chunk = Chunk(locals_of(parameters), gradients, states, parameters)
        if found_inf is None:
            self.update(group, chunk)
            return
        changed = [*chunk.parameters, *(tensor for state in states for tensor in state.values())]
        before = [tensor.clone() for tensor in changed]
        self.update(group, chunk)
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(torch.where(found_inf > 0, old, tensor))


def unscale(param_groups: list[dict[str, Any]], grad_scale: Tensor | None) -> None:
    """Divide the gradients by the scale that `torch.amp.GradScaler` hands to an optimizer; None: there is none."""
    gradients = [local(p.grad) for group in param_groups for p in group["params"] if p.grad is not None]
    if grad_scale is not None and gradients:
        torch._foreach_mul_(gradients, grad_scale.reciprocal())


def bias_corrections(steps: list[Tensor], beta: float) -> list[Tensor]:
    """1 - beta ** step for each 0-d step count, as -expm1(step * ln beta): exact in fp32 for a beta near 1 too."""
    logarithm = math.log(beta) if beta > 0.0 else -math.inf
    return list(torch.stack(steps).mul_(logarithm).expm1_().neg_().unbind())


def _chunks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of parameters whose elements together are within the limit, or one parameter."""
    chunk: list[Tensor] = []
    size = 0
    for parameter in parameters:
        limit = _CHUNK_ELEMENTS.get(parameter.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
        if chunk and size + parameter.numel() > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(parameter)
        size += parameter.numel()
    if chunk:
        yield chunk


def _read_without_waiting(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
