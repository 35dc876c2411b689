"""From the meta device to real values, parameter by parameter: no process ever holds the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.model_parallel.shards import canonical_name, fused_parameters, local, local_pieces, with_fused

InitialValue = Callable[[str, Sequence[int]], Tensor]
"""(a parameter's name, the whole one's shape) -> its whole initial value, on the CPU."""


@torch.no_grad()
def materialize(
    module: nn.Module, model: nn.Module, device: torch.device, initial_value: InitialValue, *, fill: bool = True
) -> None:
    """Give a module on the meta device memory for what is this process's of it, and the initial values.

    As a value is a function of name and shape, it is the same however the model is spread. One whole parameter at a
    time exists, on the CPU, in addition to this process's share of the model.

    Args:
        module: sharded, or not, in its final form; all of it on the meta device.
        model: the part of it that names are taken from.
        device: where the shares go.
        initial_value: gives the values of parameters and buffers.
        fill: off: what is in every checkpoint is left as memory is, because one will fill it. Drawing the numbers of a
            large model takes minutes.
    """
    allocate(module, device)
    unsaved = non_persistent_buffers(model)
    for name, tensor in named_tensors(model):
        if fill or name in unsaved:
            copy_whole_into(tensor, initial_value(name, tuple(tensor.shape)))


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give a module on the meta device memory, of no value in particular; what is tied stays tied."""
    tied = _tied_parameters(module)
    module.to_empty(device=device)
    for (first, first_name), *others in tied:  # of which torch has made one parameter each
        for other, name in others:
            other._parameters[name] = first._parameters[first_name]


@torch.no_grad()
def fill_unsaved(model: nn.Module) -> None:
    """Fill what no checkpoint will: buffers that are registered with persistent=False.

    Args:
        model: with memory, which has `initial_value(name, shape, seed)` if it has such buffers.

    Raises:
        UserError: it has not, so that their values are unknown.
    """
    buffers = dict(named_tensors(model))
    for name in sorted(non_persistent_buffers(model)):
        if not buffers[name].numel():
            continue
        initial_value: Any = getattr(model, "initial_value", None)
        if initial_value is None:
            raise UserError(
                f"{type(model).__name__}: the buffer {name} is in no checkpoint, and all processes build the model "
                f"without values; register it with persistent=True, or give the model initial_value(name, shape, seed)"
            )
        copy_whole_into(buffers[name], initial_value(name, tuple(buffers[name].shape), seed=0))


def _tied_parameters(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Of each parameter that is used in several places, the modules and what they call it."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((part, name))
    return [found for found in places.values() if len(found) > 1]


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers are not offloaded with the parameters: the forward pass reads them where it computes."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)


def is_on_meta(module: nn.Module) -> bool:
    """Whether there is a parameter without memory."""
    return any(parameter.is_meta for parameter in module.parameters())


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers with the names that the model gave them, each once."""
    fused = fused_parameters(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield canonical_name(name, model), with_fused(tensor, fused.get(id(tensor)))


def non_persistent_buffers(model: nn.Module) -> set[str]:
    """Names of the buffers that are in no checkpoint."""
    return {
        canonical_name(f"{prefix}.{name}" if prefix else name, model)
        for prefix, part in model.named_modules()
        for name in part._non_persistent_buffers_set
        if part._buffers.get(name) is not None
    }


def copy_whole_into(target: Tensor, value: Tensor) -> None:
    """Copy of a whole tensor what is this process's share of it. Nothing is sent.

    Args:
        target: a plain tensor, or a DTensor that is sharded and replicated in any way.
        value: of the same shape, any type and device, as the model's class has it.
    """
    part = local(target)
    for here, there in local_pieces(target):
        part[here].copy_(value[there])
