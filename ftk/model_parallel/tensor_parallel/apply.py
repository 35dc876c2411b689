"""Applying a plan to a model, and what a planned model is asked for afterwards."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ftk.errors import UserError
from ftk.model_parallel.check_replicas import check_replicas_over_mesh
from ftk.model_parallel.gradients import add_finisher
from ftk.model_parallel.shards import fused_parameters
from ftk.model_parallel.tensor_parallel.behaviours import Sequence, Styled, adopt
from ftk.model_parallel.tensor_parallel.functions import all_reduce
from ftk.model_parallel.tensor_parallel.plan import Plan, match_plan
from ftk.model_parallel.tensor_parallel.region import TensorRegion
from ftk.model_parallel.tensor_parallel.sharding import whole_value
from ftk.model_parallel.tensor_parallel.styles import Replicated


def check_plan(model: nn.Module, plan: Plan, size: int, sequence_parallel: bool = False) -> None:
    """Refuse what cannot work, before any process group exists.

    Args and raises: as `ftk.model_parallel.tensor_parallel.plan.match_plan`.
    """
    match_plan(model, plan, size, sequence_parallel)


def apply_plan(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, sequence_parallel: bool = False, partial: bool = False
) -> None:
    """Share the layers of a model over processes, in place; on one process nothing is done.

    Every parameter becomes a DTensor on `mesh`, cut or whole as the plan says; tied ones stay tied. The model is called
    as before, with the same inputs on every process, and gives the same outputs on every process. Under
    `sequence_parallel` the gradients of what works on parts of the sequence are to be summed once an update, after the
    last backward pass: by `ftk.model_parallel.gradients.finish_gradients(model)`. Layers of
    `ftk.model_parallel.tensor_parallel.layers` stay as they are; an empty plan makes DTensors of what is beside them.

    Args:
        model: the same on every process: whole, or on the meta device.
        plan: see `ftk.model_parallel.tensor_parallel.plan.Plan`.
        mesh: one-dimensional, over the processes that share each layer.
        sequence_parallel: between shared layers, let each process work on a part of the sequence
            (Korthikanti et al. 2022).
        partial: the model is one stage of that which the plan is for.

    Raises:
        UserError: the plan does not fit the model (`match_plan`), or the processes hold different weights.
    """
    styles = match_plan(model, plan, mesh.size(), sequence_parallel, partial)
    if mesh.size() == 1:
        return
    check_replicas_over_mesh(model, mesh)
    region = TensorRegion(mesh, sequence_parallel)
    known: dict[nn.Parameter, nn.Parameter] = {}
    cut: dict[nn.Parameter, tuple[str, tuple[int | None, int]]] = {}
    modules = [(name, module) for name, module in model.named_modules() if not isinstance(module, Styled)]
    for name, module in modules:
        style = styles.get(name, Replicated())
        for own_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            how = style.dims(module).get(own_name), getattr(style, "fused", 1)
            first_name, first = cut.setdefault(parameter, (f"{name}.{own_name}", how))
            if first != how:
                raise UserError(
                    f"tensor parallel plan: {first_name} and {name}.{own_name} are one parameter, but are not cut "
                    f"alike; give both modules styles that go together, such as vocab_embedding and vocab_output"
                )
    for name, module in modules:
        if name in styles or any(parameter is not None for parameter in module._parameters.values()):
            adopt(module, styles.get(name, Replicated()), region, known)
    if sequence_parallel:
        add_finisher(model, functools.partial(sum_sequence_gradients, model))


@torch.no_grad()
def sum_sequence_gradients(model: nn.Module) -> None:
    """Sum over the processes the gradients of what worked on parts of the sequence: once an update, before the norm.

    Gradients are linear in the micro-batches, so that one sum at the end does; all of them go in one message for each
    type of numbers.
    """
    gradients: dict[tuple[TensorRegion, torch.dtype], dict[int, Tensor]] = {}
    for module in model.modules():
        if not isinstance(module, Sequence) or not module.tensor_region.sequence_parallel:
            continue
        for parameter in module._parameters.values():
            if parameter is None or parameter.grad is None:
                continue
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            gradients.setdefault((module.tensor_region, local.dtype), {})[id(parameter)] = local
    for (region, _), found in gradients.items():
        parts = list(found.values())
        total = all_reduce(torch.cat([part.flatten() for part in parts]), region.group)
        for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))


def set_sequence_length(model: nn.Module, length: int) -> None:
    """Tell a stage that holds no embedding how long the sequences are that it gets parts of, [B, n, H].

    Needed only if the length is no multiple of the number of processes.
    """
    for module in model.modules():
        if isinstance(module, Styled):
            module.tensor_region.length = length
            return


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that the model would have on one process, on every process; all of them must ask.

    Fused layers lie as the model's class has them. Memory: the whole model.
    """
    fused = fused_parameters(model)
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        whole = whole_value(value)
        state[name] = fused[id(value)].in_model_order(whole) if id(value) in fused else whole
    return state
