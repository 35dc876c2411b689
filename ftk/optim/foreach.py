"""Optimizers that torch lacks: Lion, LAMB, and an Adafactor and an SGD whose parameters can be sharded.

Their updates are multi-tensor operations on chunks of parameters, which the device can skip.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftk.model_parallel.norms import norms
from ftk.model_parallel.shards import is_distributed, local, locals_of, sum_over_dimension
from ftk.optim.base import SkippableOptimizer, defaults_of
from ftk.optim.optimizers import OptimizerConfig

# Temporaries of an update have as many elements as a chunk. On a CPU they should stay in the cache, which halves the
# time; elsewhere few launches count.
_CHUNK_ELEMENTS = {"cpu": 1 << 20}
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 24

State = dict[str, Tensor]


class Chunk(NamedTuple):
    """Parameters that are updated at once, as lists of one length, none empty.

    For DTensors the first three hold this process's shards, as plain tensors.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[State]
    wholes: list[Any]  # the parameters themselves, for what depends on more than one element

    def entries(self, name: str) -> list[Tensor]:
        """One entry of each state."""
        return [state[name] for state in self.states]


class ForeachOptimizer(SkippableOptimizer):
    """An optimizer whose update is a few foreach operations, and which honours `found_inf` without a host wait.

    The host reads `found_inf` (0-d, on the device of the gradients) where that costs nothing, on the CPU. Elsewhere the
    update is made and, where `found_inf` is set, undone by the device: parameters and state are bit for bit what they
    were, whatever the gradients held.

    Args:
        config: the options of groups that have none of their own.
        param_groups: as from `ftk.optim.parameter_groups`; a group's own options win.
    """

    def __init__(self, config: OptimizerConfig, param_groups: list[dict[str, Any]]) -> None:
        # "capturable" is torch's word for a step count that lives on the device; checkpoints place it by that.
        super().__init__(param_groups, {**defaults_of(config), "capturable": True})

    @abstractmethod
    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        """The state of a parameter before its first update; the same entries for each parameter of one shape."""

    @abstractmethod
    def update(self, group: dict[str, Any], chunk: Chunk) -> None:
        """Change parameters and their states in place, with the options of their group."""

    def update_parameters(self, found_inf: Tensor | None) -> None:
        if found_inf is not None and _read_without_waiting(found_inf):
            if bool(found_inf):
                return
            found_inf = None
        for group in self.param_groups:
            for parameters in _chunks([p for p in group["params"] if p.grad is not None]):
                self._update_unless(found_inf, group, parameters)

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
        before = [torch.empty_like(tensor) for tensor in changed]
        torch._foreach_copy_(before, changed)
        self.update(group, chunk)
        is_skipped = found_inf > 0
        for tensor, old in zip(changed, before, strict=True):
            torch.where(is_skipped, old, tensor, out=tensor)


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


class SGD(ForeachOptimizer):
    """Gradient descent with momentum (Sutskever et al. 2013) and an L2 penalty.

    g = g + decay p
    m = b m + g
    p = p - lr m          (Nesterov's: lr (g + b m))

    `torch.optim.SGD` computes the same; its fused kernel, which alone can be skipped by the device, takes no DTensor,
    and leaves momentum uninitialised where the first step is skipped.
    """

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}

    def update(self, group: dict[str, Any], chunk: Chunk) -> None:
        steps, momentum = chunk.gradients, group["momentum"]
        if group["weight_decay"] != 0.0:
            steps = list(torch._foreach_add(steps, chunk.parameters, alpha=group["weight_decay"]))
        if momentum != 0.0:
            momenta = chunk.entries("momentum_buffer")
            torch._foreach_mul_(momenta, momentum)
            torch._foreach_add_(momenta, steps)
            steps = list(torch._foreach_add(steps, momenta, alpha=momentum)) if group["nesterov"] else momenta
        torch._foreach_add_(chunk.parameters, steps, alpha=-group["lr"])


class Lion(ForeachOptimizer):
    """Evolved sign momentum (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2).

    c = b1 m + (1 - b1) g
    p = p - lr (sign(c) + decay p)
    m = b2 m + (1 - b2) g
    """

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        return {"momentum": torch.zeros_like(parameter)}

    def update(self, group: dict[str, Any], chunk: Chunk) -> None:
        beta1, beta2 = group["betas"]
        momenta = chunk.entries("momentum")
        directions = torch._foreach_lerp(momenta, chunk.gradients, 1.0 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(chunk.parameters, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(chunk.parameters, directions, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, chunk.gradients, 1.0 - beta2)


class Lamb(ForeachOptimizer):
    """Layer-wise adaptive moments (You et al. 2020, https://arxiv.org/abs/1904.00962, algorithm 2).

    u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p
    p = p - lr |p| / |u| u          (the ratio is 1 where one of the norms is 0)
    """

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=parameter.device), **moments}

    def update(self, group: dict[str, Any], chunk: Chunk) -> None:
        parameters, gradients, (beta1, beta2) = chunk.parameters, chunk.gradients, group["betas"]
        steps, means, squares = (chunk.entries(name) for name in ("step", "exp_avg", "exp_avg_sq"))
        torch._foreach_add_(steps, 1.0)
        torch._foreach_lerp_(means, gradients, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - beta2)

        denominators = torch._foreach_div(squares, _bias_corrections(steps, beta2))
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        directions = list(torch._foreach_div(means, _bias_corrections(steps, beta1)))
        torch._foreach_div_(directions, denominators)
        if group["weight_decay"] != 0.0:
            torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        if group["weight_decay"] != 0.0 or group["always_adapt"]:
            torch._foreach_mul_(directions, _trust_ratios(parameters, directions, chunk.wholes))
        torch._foreach_add_(parameters, directions, alpha=-group["lr"])


def _trust_ratios(parameters: list[Tensor], directions: list[Tensor], wholes: list[Any]) -> list[Tensor]:
    """|p| / |u| for each pair, 0-d; 1 where a norm is 0."""
    weights, steps = norms(parameters, wholes), norms(directions, wholes)
    return list(torch.where((weights > 0.0) & (steps > 0.0), weights / steps, 1.0).unbind())


def _bias_corrections(steps: list[Tensor], beta: float) -> list[Tensor]:
    """1 - beta ** step for each 0-d step count, as -expm1(step * ln beta): exact in fp32 for a beta near 1 too."""
    logarithm = math.log(beta) if beta > 0.0 else -math.inf
    return list(torch.stack(steps).mul_(logarithm).expm1_().neg_().unbind())


class Adafactor(ForeachOptimizer):
    """Adaptive rates with sublinear memory (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235).

    `torch.optim.Adafactor` reads the step count and every norm on the host, ignores `found_inf`, and applies
    the first epsilon elsewhere than the paper does.
    """

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        state = {"step": torch.zeros((), device=parameter.device)}
        if parameter.ndim >= 2:
            state["row"] = torch.zeros_like(parameter[..., :1])  # [..., N, 1]
            state["column"] = torch.zeros_like(parameter[..., :1, :])  # [..., 1, M]
        else:
            state["square"] = torch.zeros_like(parameter)
        if group["beta1"] > 0.0:
            state["exp_avg"] = torch.zeros_like(parameter)
        return state

    def update(self, group: dict[str, Any], chunk: Chunk) -> None:
        # One parameter after another: what is temporary is then one matrix, which is why one takes Adafactor.
        for parameter, gradient, state, whole in zip(*chunk, strict=True):
            _update_one(group, parameter, gradient, state, whole)


def _update_one(group: dict[str, Any], parameter: Tensor, gradient: Tensor, state: State, whole: Any) -> None:
    """`whole` is what the parameter is a part of; means are over it."""
    step = state["step"].add_(1.0)
    direction = _direction(gradient, state, step.pow(group["beta2_decay"]), group["eps"][0], whole)
    rate: Any = group["lr"]
    if group["relative_step"]:
        rate = step.rsqrt().clamp(max=rate)
    decay = rate * group["weight_decay"]
    if group["scale_parameter"]:
        rate = rate * _root_mean_square(parameter, whole).clamp(min=group["eps"][1])
    # The clipped direction times the rate, in one pass.
    direction *= rate / (_root_mean_square(direction, whole) / group["clip_threshold"]).clamp(min=1.0)
    if group["beta1"] > 0.0:
        direction = state["exp_avg"].lerp_(direction, 1.0 - group["beta1"])
    if group["weight_decay"] != 0.0:
        parameter.mul_(1.0 - decay)
    parameter.sub_(direction)


def _direction(gradient: Tensor, state: State, weight: Tensor, eps: float, whole: Any) -> Tensor:
    """The gradient over the root of its second moment, which takes in the new square with `weight`, 0-d."""
    if "square" in state:
        return gradient * state["square"].lerp_(gradient.square().add_(eps), weight).rsqrt()
    row = state["row"].lerp_(_mean_square(gradient, -1, whole).add_(eps), weight)
    column = state["column"].lerp_(_mean_square(gradient, -2, whole).add_(eps), weight)
    # Algorithm 4 has R C / sum(R) of sums; with means it is R C / mean(R).
    mean = row.mean(-2, keepdim=True)
    if is_distributed(whole):
        mean = sum_over_dimension(row.sum(-2, keepdim=True), whole, -2) / whole.shape[-2]
    return (gradient * (row / mean).rsqrt_()).mul_(column.rsqrt())


def _mean_square(tensor: Tensor, dim: int, whole: Any) -> Tensor:
    """Over one dimension, which stays as one of size 1. By norms, so that no squares as large as `tensor` are made."""
    squares = torch.linalg.vector_norm(tensor, dim=dim, keepdim=True).square_()
    return sum_over_dimension(squares, whole, dim).div_(whole.shape[dim])


def _root_mean_square(tensor: Tensor, whole: Any) -> Tensor:
    return norms([tensor], [whole])[0] / math.sqrt(whole.numel())
