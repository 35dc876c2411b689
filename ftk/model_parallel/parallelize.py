"""Parallelises a model from outside: one order for all steps."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.model_parallel.blocks import blocks_of, needed_blocks
from ftk.model_parallel.check_replicas import check_replicas, copy_from_first, mesh_device
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.data_parallel import require_gradients, uses_ddp, uses_fsdp, wrap_in_ddp
from ftk.model_parallel.engine import prepare_model
from ftk.model_parallel.materialize import is_on_meta, materialize, move_buffers
from ftk.model_parallel.shards import is_distributed
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
    activation_checkpointing: str = "auto",
    compile: str = "none",
    zero_stage: int = 3,
    cpu_offload: bool = False,
    weights: str = "auto",
    initial_value: Callable[[str, Sequence[int]], Tensor] | None = None,
) -> nn.Module:
    """Parallelise any model, in place: its code, and the names of its parameters, stay as they are.

    Without a plan its list of blocks is found, the blocks are checkpointed, and their parameters sharded by FSDP2;
    a model without one is sharded as a whole. With a plan layers are cut by tensor parallel; over further dimensions
    of the mesh parameters are sharded too. Parameters become DTensors. Backward passes sum gradients over the
    processes of data parallel, as over one large batch: divide the loss by the size of the whole batch.

    Several backward passes before the optimizer's step add up. With `zero_stage` 1, and with replicas, gradients are
    sent after the last of them alone if the forward and backward pass of each micro-batch are put into
    `with ftk.model_parallel.gradients.gradient_sync(model, enabled=is_last):`.

    Args:
        model: of any kind, with its repeated blocks in an `nn.ModuleList` (or an `nn.Sequential` or `nn.ModuleDict` of
            like parts). Its values on the first process go to all, unless it is on the meta device.
        mesh: of one dimension, or with those of the names "replicate", "shard" and "tensor" that are wanted, in this
            order.
        plan: for tensor parallel, patterns of module names with their styles (`ftk.model_parallel.tensor_parallel`).
        sequence_parallel: between the layers that the plan cuts, sequences are sharded. Then
            `ftk.model_parallel.tensor_parallel.apply.sum_sequence_gradients(model)` must be called once per update,
            after its last backward pass: the gradients of what works on parts of a sequence are partial until then.
        activation_checkpointing: what blocks keep for the backward pass: "full": their input; "selective": and results
            of matrix products; "none": all; "auto": as "full" where there are blocks. A model that caches keys and
            values must not do so in training.
        compile: "none", "block" or "model"; "auto": "block" on CUDA where there are blocks.
        zero_stage: what is sharded: 1: optimizer state, 2: and gradients, 3: and parameters.
        cpu_offload: parameters and what the optimizer keeps stay on the host.
        weights: type in which sharded parameters are gathered and computed with: "auto": their own; "fp32" or "bf16".
            Gradients are summed in float32.
        initial_value: of a model on the meta device, of each parameter by name and shape; its own method
            `initial_value(name, shape, seed)` if it has one and this is not given.

    Returns:
        The model.

    Raises:
        UserError: mesh, model, plan and options do not go together; or the model is parallelized already.
    """
    sharding = {"zero_stage": zero_stage, "cpu_offload": cpu_offload, "weights": weights}
    _check_options(
        sequence_parallel=sequence_parallel,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        **sharding,
    )
    _check_new(model)
    data_mesh, tensor_mesh = _split_mesh(mesh, plan)
    if sequence_parallel and plan is None:
        raise UserError("sequence_parallel=True is for layers that a plan cuts; give a plan, or leave it out")
    defaults = {"zero_stage": 3, "cpu_offload": False, "weights": "auto"}
    changed = [name for name in defaults if sharding[name] != defaults[name]]
    if changed and data_mesh is None and not {"replicate", "shard"} & set(mesh.mesh_dim_names or ()):
        raise UserError(
            f"{changed[0]}={sharding[changed[0]]!r} is for parameters that are sharded, and this mesh is all for "
            f'tensor parallel; leave it out, or give the mesh a dimension "shard", too'
        )
    if activation_checkpointing == "auto":
        activation_checkpointing = "full" if blocks_of(model) else "none"
    parallel = ParallelConfig(sequence_parallel=sequence_parallel, **sharding)  # type: ignore[arg-type]
    engine = EngineConfig(activation_checkpointing=activation_checkpointing, compile=compile)
    changes = _Changes(tensor_mesh, data_mesh, plan, parallel, engine)
    changes.check(model)
    copy_from_first(model, mesh)
    changes.apply(model, model, mesh_device(mesh), initial_value or _initial_value_of(model, None))
    return model


class ParallelizedStep(NamedTuple):
    """What a training loop calls of a parallelised model.

    Attributes:
        module: what is called in the step: the one that was given, or where there are replicas, DDP around it.
        finishers: to be called in order once per update, after its last backward pass and before the norm of the
            gradients: they sum what is still partial, or refuse what DDP would wait for.
    """

    module: nn.Module
    finishers: tuple[Callable[[], None], ...] = ()


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
) -> ParallelizedStep:
    """Turn a model into this process's part of it, ready for training.

    The order: tensor parallel by the plan, activation checkpointing, compilation, data parallel, and, of a model on
    the meta device, memory and initial values at last. Freeze parameters before this call, and build the
    optimizer after it, from the parameters of the inner model (`StepModule.model`), whose names stay.

    Args:
        module: a `StepModule`, or the stage of a pipeline. With more than one process best on the meta
            device; otherwise with values that are equal on all.
        plan: of tensor parallel, for worlds that have it; `model.tensor_parallel_plan` if not given.
        seed: of the initial values of a model on the meta device, which `model.initial_value(name, shape, seed)` gives.
        fill: off: parameters of a model on the meta device get memory and no values, as a checkpoint will fill them.

    Returns:
        What to call in the step, and once per update.

    Raises:
        UserError: the world has tensor parallel, and there is no plan; or the model is on the meta device, and gives
            no initial values; or processes have built it with different values.
    """
    model = module.model if isinstance(module, StepModule) else module
    check_replicas(model, world)
    tensor_mesh = data_mesh = None
    if world.sizes.tensor > 1:
        from ftk.model_parallel.tensor_parallel.plan import plan_of

        plan = plan_of(model, world.sizes.tensor) if plan is None else plan
        assert world.mesh is not None
        tensor_mesh = world.mesh["tensor"]
    if uses_fsdp(world, parallel):
        if world.mesh is None:
            raise UserError("`cpu_offload` and `weights` bf16 need a process group: use the world of 'open_world'")
        data_mesh = world.mesh["replicate", "shard"] if world.sizes.replicate > 1 else world.mesh["shard"]
    values, partial = _initial_value_of(model, seed), world.sizes.pipeline > 1
    changes = _Changes(tensor_mesh, data_mesh, plan, parallel, engine)
    finishers = changes.apply(module, model, world.device, values, precision=precision, fill=fill, partial=partial)
    if not uses_ddp(world, parallel):
        return ParallelizedStep(module, finishers)
    if not parallel.find_unused_parameters:
        finishers += (functools.partial(require_gradients, model),)
    return ParallelizedStep(wrap_in_ddp(module, world, parallel), finishers)


class _Changes(NamedTuple):
    """What is done to a model.

    Attributes:
        tensor_mesh, data_mesh: over which the plan cuts layers, and over which parameters are sharded; None: none.
        plan: of tensor parallel.
    """

    tensor_mesh: DeviceMesh | None
    data_mesh: DeviceMesh | None
    plan: Any
    parallel: ParallelConfig
    engine: EngineConfig

    def check(self, model: nn.Module) -> None:
        """Refuse all that a step of `apply` would: a model that is half changed could not be given again."""
        if self.engine.activation_checkpointing != "none":
            needed_blocks(model, "activation_checkpointing")
        if self.engine.compile == "block":
            needed_blocks(model, "compile")
        if self.data_mesh is not None:
            from ftk.model_parallel.fully_sharded import check_dimensions

            check_dimensions(model)
        if self.tensor_mesh is not None:
            from ftk.model_parallel.tensor_parallel.plan import match_plan

            match_plan(model, self.plan, self.tensor_mesh.size(), self.parallel.sequence_parallel)

    def apply(
        self,
        module: nn.Module,
        model: nn.Module,
        device: torch.device,
        initial_value: Callable[[str, Sequence[int]], Tensor] | None,
        *,
        precision: str = "fp32",
        fill: bool = True,
        partial: bool = False,
    ) -> tuple[Callable[[], None], ...]:
        """The one order, in place: tensor parallel, checkpointing, compile, shards, and at last memory and values for
        what has none; what has some goes to the device.

        Args:
            module: what is called in the step: the model, or a `StepModule` around it.
            model: whose layers are cut, checkpointed and compiled, and whose parameters have their names.
            partial: the model is one stage of that which the plan is for.

        Returns:
            The finishers, see `ParallelizedStep`.
        """
        finishers: tuple[Callable[[], None], ...] = ()
        if self.tensor_mesh is not None:  # where it is not needed, it is not loaded
            from ftk.model_parallel.tensor_parallel.apply import apply_plan, sum_sequence_gradients

            apply_plan(model, self.plan, self.tensor_mesh, self.parallel.sequence_parallel, partial=partial)
            if self.parallel.sequence_parallel:
                finishers = (functools.partial(sum_sequence_gradients, model),)
        prepare_model(model, self.engine, device)
        offload = self.parallel.cpu_offload and self.data_mesh is not None
        if self.data_mesh is not None:
            from ftk.model_parallel.fully_sharded import apply_fsdp

            apply_fsdp(module, self.data_mesh, self.parallel, precision)
        if is_on_meta(module):
            if initial_value is None:
                raise UserError(
                    f"{type(model).__name__} is on the meta device, and has no initial_value(name, shape, seed) that "
                    f"could fill it; build it on the CPU"
                )
            materialize(module, model, torch.device("cpu") if offload else device, initial_value, fill=fill)
            move_buffers(module, device)
        elif not offload:
            module.to(device)
        return finishers


def _initial_value_of(model: nn.Module, seed: int | None) -> Callable[[str, Sequence[int]], Tensor] | None:
    own: Any = getattr(model, "initial_value", None)
    return None if own is None else functools.partial(own, seed=torch.initial_seed() if seed is None else seed)


def _check_new(model: nn.Module) -> None:
    """Refuse a model that is parallelised already, or has such a part."""
    for name, part in model.named_modules():
        by_plan = any(map(is_distributed, part._parameters.values()))
        if by_plan or hasattr(part, "set_requires_gradient_sync"):  # the latter: FSDP2
            raise UserError(
                f"{name or type(model).__name__} is parallelized already; give ftk.parallelize the whole model, once, "
                f"as it is on one process"
            )


def _check_options(**given: Any) -> None:
    """Each is one of the choices that the option of a run has, or, where it has none, a bool."""
    fields = {field.name: field for config in (ParallelConfig, EngineConfig) for field in dataclasses.fields(config)}
    mistakes = []
    for name, value in given.items():
        choices = fields[name].metadata.get("choices", (False, True))
        if name == "activation_checkpointing":
            choices = ("auto", *choices)
        if not any(type(value) is type(choice) and value == choice for choice in choices):  # True is 1, too
            allowed = ", ".join(map(repr, choices[:-1]))
            mistakes.append(f"{name} is {value!r}; it must be {allowed} or {choices[-1]!r}")
    if mistakes:
        raise UserError("ftk.parallelize: " + "; ".join(mistakes))


def _split_mesh(mesh: DeviceMesh, plan: Any) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """A user's mesh: the dimensions over which data parallel and tensor parallel shard parameters."""
    from torch.distributed.device_mesh import DeviceMesh  # where it is not needed, it is not loaded

    if not isinstance(mesh, DeviceMesh):
        raise UserError(
            f"mesh is {mesh!r}; it must be a DeviceMesh, such as "
            f'torch.distributed.device_mesh.init_device_mesh("cuda", (8,))'
        )
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    places = [DIMENSIONS.index(name) for name in names if name in DIMENSIONS]
    if mesh.ndim == 1 and not places:
        return (mesh, None) if plan is None else (None, mesh)
    sizes = dict(zip(names, mesh.shape, strict=False))
    if len(places) < mesh.ndim or sizes.get("pipeline", 1) > 1 or places != sorted(places):
        raise UserError(
            f"a mesh of {tuple(mesh.shape)} with the names {names}; give one of one dimension, or with those of the "
            f'names "replicate", "shard" and "tensor" that are wanted, in this order'
        )
    if "tensor" not in sizes if plan is not None else sizes.get("tensor", 1) > 1:
        raise UserError(
            f'a plan is for a dimension "tensor" of the mesh, whose names are {names}; give both, or neither of them'
        )
    tensor = mesh["tensor"] if plan is not None else None
    if "replicate" in sizes and "shard" not in sizes:
        mesh, sizes = _with_shards_of_one(mesh), {**sizes, "shard": 1}
    shared = tuple(name for name in ("replicate", "shard") if name in sizes)
    data = mesh[shared if sizes.get("replicate", 1) > 1 else "shard"] if shared else None
    if tensor is not None and data is not None and data.size() == 1:
        data = None
    return data, tensor


def _with_shards_of_one(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of replicas with a dimension "shard" of one process, for FSDP2, whose replicas are of shards."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    # Making groups is a collective of all processes, and a slice of a mesh does not contain all of them.
    if mesh.size() != dist.get_world_size():
        raise UserError(
            f"a mesh of {tuple(mesh.shape)} with the names {names} over some of {dist.get_world_size()} processes; "
            f'give it a dimension "shard" after "replicate", of size 1 for plain copies'
        )
    place = names.index("replicate") + 1
    with_shards = (*names[:place], "shard", *names[place:])
    return DeviceMesh(mesh.device_type, mesh.mesh.unsqueeze(place), mesh_dim_names=with_shards)
