"""Applies a plan to a model, and gives access to the result: its state dict and sequence gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ftk.errors import UserError
from ftk.model_parallel.blocks import has_two_stacks
from ftk.model_parallel.shards import Fused, as_dtensor, fused_parameters, local, local_pieces, with_fused
from ftk.model_parallel.tensor_parallel.functions import all_reduce, part_size
from ftk.model_parallel.tensor_parallel.plan import Plan, match_plan
from ftk.model_parallel.tensor_parallel.region import TensorRegion
from ftk.model_parallel.tensor_parallel.styles import (
    Replicated,
    SequenceModule,
    Style,
    Styled,
    TiedVocabEmbeddingModule,
    VocabEmbeddingModule,
)


def apply_plan(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, sequence_parallel: bool = False, partial: bool = False
) -> None:
    """Share the layers of a model over processes, in place; on one process nothing is done.

    Every parameter becomes a DTensor on `mesh`, cut or whole as the plan says; tied ones stay tied. The model is called
    as before, with the same inputs on every process, and gives the same outputs on every process. Under
    `sequence_parallel` the gradients of what works on parts of the sequence must be summed once per update, after the
    last backward pass: by `sum_sequence_gradients(model)`.

    Args:
        model: the same on every process: whole, or on the meta device.
        plan: see `ftk.model_parallel.tensor_parallel.plan.Plan`.
        mesh: one-dimensional, over the processes that share each layer.
        sequence_parallel: between shared layers, let each process work on a part of the sequence
            (Korthikanti et al. 2022).
        partial: the model is one stage of that which the plan is for.

    Raises:
        UserError: the plan does not fit the model (`match_plan`).
    """
    styles = match_plan(model, plan, mesh.size(), sequence_parallel, partial)
    if mesh.size() == 1:
        return
    region = TensorRegion(mesh, sequence_parallel, has_two_stacks(model))
    known: dict[nn.Parameter, nn.Parameter] = {}
    cut: dict[nn.Parameter, tuple[str, tuple[int | None, int]]] = {}
    modules = list(model.named_modules())
    for name, module in modules:
        style = styles.get(name, Replicated())
        for own_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            how = style.dims(module).get(own_name), getattr(style, "fused", 1)
            first_name, first = cut.setdefault(parameter, (f"{name}.{own_name}", how))
            if first != how:
                raise UserError(
                    f"tensor parallel plan: {first_name} and {name}.{own_name} are one parameter, but are not sharded "
                    f"the same way; give both modules matching styles, such as vocab_embedding and vocab_output"
                )
    for name, module in modules:
        if name in styles or any(parameter is not None for parameter in module._parameters.values()):
            _adopt(module, styles.get(name, Replicated()), region, known)


def _adopt(module: nn.Module, style: Style, region: TensorRegion, known: dict[nn.Parameter, nn.Parameter]) -> None:
    """Make a module one of the processes of `region`, in place: parameters become DTensors, the class a subclass.

    Args:
        module: as on one process, the same on each; on any device, the meta device too.
        style: what is shared. Checked before.
        known: parameters that were distributed already, by what they were: tied ones stay one. Those of this module are
            added.
    """
    dims, fused = style.dims(module), getattr(style, "fused", 1)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if parameter not in known:
            known[parameter] = _distributed_parameter(parameter, region.mesh, dims.get(name), fused)
        module._parameters[name] = known[parameter]
    module.tensor_style, module.tensor_region = style, region  # type: ignore[assignment]
    if fused > 1:
        module.fused_parameters = {name: Fused(dim, fused, region.size) for name, dim in dims.items()}  # type: ignore[assignment]
    module.register_load_state_dict_pre_hook(_cut_state_dict)
    behaviour = style.behaviour
    if behaviour is VocabEmbeddingModule and hasattr(module, "logits"):
        behaviour = TiedVocabEmbeddingModule
    if not isinstance(module, behaviour):
        module.__class__ = _subclass(type(module), behaviour, tuple(module._parameters))  # type: ignore[arg-type]
    for attribute in style.divide:
        setattr(module, attribute, getattr(module, attribute) // region.size)


def _distributed_parameter(whole: nn.Parameter, mesh: DeviceMesh, dim: int | None, fused: int = 1) -> nn.Parameter:
    """The parameter as a DTensor on a one-dimensional mesh; nothing is communicated.

    Args:
        whole: the same on every process, or on the meta device.
        dim: along which each process gets a part; None: all of it.
        fused: the number of equal layers concatenated in `whole` along `dim`, each of which is cut
            (`ftk.model_parallel.shards.Fused`).
    """
    values = whole.detach()
    placement: Placement = Replicate()
    if dim is None:
        part = values.contiguous()
    else:
        part = local_chunk(values.unflatten(dim, (fused, -1)), mesh, dim + 1).flatten(dim, dim + 1)
        placement = Shard(dim)
    stride = torch.empty(values.shape, device="meta").stride()
    made = DTensor.from_local(part, mesh, [placement], run_check=False, shape=values.shape, stride=stride)
    return nn.Parameter(made, requires_grad=whole.requires_grad)


def local_chunk(whole: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This process's part along `dim`, cut as `torch.chunk` cuts: a copy, so that the whole can be freed."""
    length, size = whole.size(dim), part_size(whole.size(dim), mesh.size())
    start = min(mesh.get_local_rank() * size, length)
    return whole.narrow(dim, start, min(size, length - start)).clone(memory_format=torch.contiguous_format)


def _cut_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a module loads a state dict: of whole tensors for its DTensors, take this process's part. Nothing is sent.

    Args:
        state: changed in place.
        prefix: of the module's names in it.
    """
    fused = getattr(module, "fused_parameters", {})
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if value.shape != parameter.shape:  # torch names both shapes
            continue
        # A copy: load_state_dict(assign=True) would keep the whole alive.
        part = torch.empty(parameter.to_local().shape, dtype=value.dtype, device=value.device)
        for here, there in local_pieces(with_fused(parameter.detach(), fused.get(name))):
            part[here] = value.detach()[there]
        state[prefix + name] = as_dtensor(part, parameter)


# Cached, so that the blocks of a model stay instances of one class, and torch.compile makes one graph for all.
@functools.cache
def _subclass(cls: type, behaviour: type, names: tuple[str, ...]) -> type:
    members = {name: _local_parameter(name) for name in names}
    return type(cls.__name__, (behaviour, cls), {"__module__": cls.__module__, **members})


def _local_parameter(name: str) -> property:
    """A property that gives this process's part of a parameter to the module's forward pass."""

    def read(module: Styled) -> Tensor | None:
        if name not in module._parameters:
            raise AttributeError(name)
        parameter = module._parameters[name]
        # A parameter that FSDP2 shards further is read by FSDP2 itself, not by the forward pass.
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1:
            return module.seen(name, parameter)
        return parameter

    return property(read)


@torch.no_grad()
def sum_sequence_gradients(model: nn.Module) -> None:
    """Sum over the processes the gradients of what worked on parts of the sequence: once per update, before the norm.

    Gradients are linear in the micro-batches, so that one sum at the end does; all of them go in one message for each
    type of numbers.
    """
    gradients: dict[tuple[TensorRegion, torch.dtype], dict[int, Tensor]] = {}
    for module in model.modules():
        if not isinstance(module, SequenceModule) or not module.tensor_region.sequence_parallel:
            continue
        for parameter in module._parameters.values():
            if parameter is None or parameter.grad is None:
                continue
            own = local(parameter.grad)
            gradients.setdefault((module.tensor_region, own.dtype), {})[id(parameter)] = own
    for (region, _), found in gradients.items():
        parts = list(found.values())
        total = all_reduce(torch.cat([part.flatten() for part in parts]), region.group)
        for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that the model would have on one process; all processes must call this.

    Fused layers lie as the model's class has them. Memory: the whole model.
    """
    fused = fused_parameters(model)
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        found = value.detach()
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        state[name] = fused[id(value)].in_model_order(whole) if id(value) in fused else whole
    return state
