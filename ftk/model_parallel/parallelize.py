"""A model spread over processes, from outside: one order for all that is done to it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.model_parallel.data_parallel import copy_over_processes, share_over_processes, uses_copies, uses_shares
from ftk.model_parallel.engine import prepare_model
from ftk.model_parallel.engine_config import EngineConfig
from ftk.model_parallel.equal import check_equal, make_equal, mesh_device
from ftk.model_parallel.parallel_config import ParallelConfig
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import DIMENSIONS, World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Any = None,
    *,
    sequence_parallel: bool = False,
    activation_checkpointing: str = "full",
    compile: str = "none",
    zero_stage: int = 3,
    cpu_offload: bool = False,
    gather_dtype: str = "auto",
    initial_value: Callable[[str, Sequence[int]], Tensor] | None = None,
) -> nn.Module:
    """Spread any model over processes, in place: its code, and the names of its parameters, stay as they are.

    Without a plan its list of blocks is found, the blocks are checkpointed, and their parameters shared out by FSDP2.
    With a plan layers are cut by tensor parallel; over further dimensions of the mesh parameters are shared out too.
    Parameters become DTensors. Backward passes sum gradients over the processes of data parallel, as over one large
    batch: divide the loss by the size of the whole batch.

    Args:
        model: of any kind, with its repeated blocks in an `nn.ModuleList`. Its values on the first process go to all,
            unless it is on the meta device.
        mesh: of one dimension, or with the names "replicate", "shard" and "tensor", some of them.
        plan: for tensor parallel, patterns of module names with their styles (`ftk.model_parallel.tensor_parallel`).
        sequence_parallel: between the layers that the plan cuts, sequences are shared out. Then
            `ftk.model_parallel.gradients.finish_gradients(model)` is to be called once an update, after its last
            backward pass: the gradients of what works on parts of a sequence are partial until then.
        activation_checkpointing: what blocks keep for the backward pass: "full": their input; "selective": and results
            of matrix products; "none": all. A model that caches keys and values must not do so in training.
        compile: "none", "block" or "model".
        zero_stage: what is shared out: 1: optimizer state, 2: and gradients, 3: and parameters.
        cpu_offload: parameters and what the optimizer keeps stay on the host.
        gather_dtype: in which shared-out parameters are gathered and computed with: "auto": their own type; "fp32" or
            "bf16". Gradients are summed in float32.
        initial_value: of a model on the meta device, of each parameter by name and shape; its own method
            `initial_value(name, shape, seed)` if it has one and this is not given.

    Returns:
        The model.

    Raises:
        UserError: mesh, model or plan do not go together.
    """
    data_mesh, tensor_mesh = _split_mesh(mesh, has_plan=plan is not None)
    parallel = ParallelConfig(zero_stage=zero_stage, cpu_offload=cpu_offload, gather_dtype=gather_dtype)
    make_equal(model, mesh)
    if tensor_mesh is not None:
        _apply_plan(model, plan, tensor_mesh, sequence_parallel)
    prepare_model(model, EngineConfig(activation_checkpointing=activation_checkpointing, compile=compile))
    if data_mesh is not None:
        share_over_processes(model, data_mesh, parallel, precision="fp32")
    offload = cpu_offload and data_mesh is not None
    _materialize(model, model, mesh_device(mesh), None, offload=offload, initial_value=initial_value)
    return model


def parallelize_training(
    module: nn.Module,
    world: World,
    parallel: ParallelConfig,
    engine: EngineConfig,
    *,
    precision: str = "fp32",
    plan: Any = None,
    seed: int | None = None,
    fill: bool = True,
) -> nn.Module:
    """Make of a model on one process this process's part of it, ready to be trained.

    The order: tensor parallel by the plan, activation checkpointing, compilation, data parallel, and, of a model on
    the meta device, memory and initial values at last. Which parameters are frozen is to be settled before; the
    optimizer is to be built after, from the parameters of the inner model (`StepModule.model`), whose names stay.

    Args:
        module: a `StepModule`, or the stage of a pipeline. Of several processes that shard it, best on the meta
            device; otherwise with values that are equal on all.
        world: of this process.
        parallel: how parameters are shared out.
        engine: activation checkpointing and compilation.
        precision: of the run.
        plan: of tensor parallel, for worlds that have it; `model.tensor_parallel_plan` if not given.
        seed: of the initial values of a model on the meta device, which `model.initial_value(name, shape, seed)` gives.
        fill: off: parameters of a model on the meta device get memory and no values, as a checkpoint will fill them.

    Returns:
        What to call in the step: the module itself, or where there are copies, DDP around it.

    Raises:
        UserError: the world has tensor parallel, and there is no plan; or the model is on the meta device, and gives
            no initial values; or processes have built it with different values.
    """
    model = module.model if isinstance(module, StepModule) else module
    check_equal(model, world)
    if world.sizes.tensor > 1:
        from ftk.model_parallel.tensor_parallel.plan import plan_of

        plan = plan_of(model, world.sizes.tensor) if plan is None else plan
        assert world.mesh is not None
        # A stage of a pipeline has not all that a plan for the whole model names.
        partial = world.sizes.pipeline > 1
        _apply_plan(model, plan, world.mesh["tensor"], parallel.sequence_parallel, partial=partial)
    prepare_model(model, engine)
    shares = uses_shares(world, parallel)
    if parallel.cpu_offload and not shares:
        logger.warning("--cpu-offload is for several processes (torchrun); this one keeps all on %s", world.device)
    if shares:
        assert world.mesh is not None
        over = world.mesh["replicate", "shard"] if world.sizes.replicate > 1 else world.mesh["shard"]
        share_over_processes(module, over, parallel, precision)
    _materialize(module, model, world.device, seed, offload=shares and parallel.cpu_offload, fill=fill)
    if uses_copies(world, parallel):
        return copy_over_processes(module, world, parallel)
    return module


def _apply_plan(model: nn.Module, plan: Any, mesh: DeviceMesh, sequence_parallel: bool, partial: bool = False) -> None:
    from ftk.model_parallel.tensor_parallel.apply import apply_plan  # where it is not needed, it is not loaded

    apply_plan(model, plan, mesh, sequence_parallel, partial=partial)


def _materialize(
    module: nn.Module,
    model: nn.Module,
    device: torch.device,
    seed: int | None,
    *,
    offload: bool,
    fill: bool = True,
    initial_value: Callable[[str, Sequence[int]], Tensor] | None = None,
) -> None:
    """Values on the device, in this process's share, for what has none yet; what has some goes there."""
    from ftk.model_parallel.materialize import is_on_meta, materialize, move_buffers

    if not is_on_meta(module):
        if not offload:
            module.to(device)
        return
    if initial_value is None:
        own: Any = getattr(model, "initial_value", None)
        if own is None:
            raise UserError(
                f"{type(model).__name__} is on the meta device, and has no initial_value(name, shape, seed) that could "
                f"fill it; build it on the CPU"
            )
        initial_value = functools.partial(own, seed=torch.initial_seed() if seed is None else seed)
    materialize(module, model, torch.device("cpu") if offload else device, initial_value, fill=fill)
    move_buffers(module, device)


def _split_mesh(mesh: DeviceMesh, has_plan: bool) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """A user's mesh: what data parallel shares parameters out over, and what tensor parallel cuts them over."""
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    if mesh.ndim == 1 and not set(names) & set(DIMENSIONS):
        return (None, mesh) if has_plan else (mesh, None)
    sizes = dict(zip(names, mesh.shape, strict=False))
    unknown = mesh.ndim - len(set(names) & set(DIMENSIONS))
    if unknown or sizes.get("pipeline", 1) > 1 or ("replicate" in sizes and "shard" not in sizes):
        raise UserError(
            f"a mesh of {tuple(mesh.shape)} with the names {names}; give one of one dimension, or with the names "
            f'"shard", "tensor", ("replicate", "shard"), ("shard", "tensor") or ("replicate", "shard", "tensor")'
        )
    if "tensor" not in sizes if has_plan else sizes.get("tensor", 1) > 1:
        raise UserError(
            f'a plan is for a dimension "tensor" of the mesh, whose names are {names}; give both, or neither of them'
        )
    shared = tuple(name for name in ("replicate", "shard") if name in sizes)
    data = mesh[shared if sizes.get("replicate", 1) > 1 else "shard"] if shared else None
    if has_plan and data is not None and data.size() == 1:
        data = None
    return data, mesh["tensor"] if has_plan else None
