"""FSDP2: parameters, gradients and optimizer state sharded over processes, whole only where they are needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ftk.errors import UserError
from ftk.model_parallel.blocks import blocks_of
from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.data_parallel import make_gradients_dense
from ftk.model_parallel.step_module import StepModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def apply_fsdp(module: nn.Module, mesh: DeviceMesh, config: ParallelConfig, precision: str) -> None:
    """Shard a module's parameters over processes, in place: they become DTensors, cut along their first dimension.

    - A block's parameters are gathered for each of its passes, those in no block for the module's forward and backward
      pass together. What a block shares with something in no block is gathered with the latter; of blocks that share a
      parameter only with each other, the first counts as in no block.
    - Gradients are summed, not averaged. An update of m micro-batches sends, in multiples of all parameters
      (Rajbhandari et al. 2020, section 7, for m = 1): in stage 1 2, as parameters are gathered and gradients scattered
      once; in stage 2 1 + m; in stage 3 3 m, of what is in no block 2 m.
    - On a mesh of one process nothing is sent: blocks are copied to the device, or to bf16, instead.
    - Outside of forward and backward passes parameters are always shards, also after a forward pass without gradients.
    - In bf16 and fp16 autocast chooses the type of each operator. So the inputs of the module and its blocks keep their
      type, and parameters in no block are gathered in their own: in bf16 embeddings would round the hidden states, and
      the output layer the gradient of its matrix. In fp32 all is computed in the gathered type.

    Args:
        module: as it is called in the step; on the meta device, or with equal values on all processes.
        mesh: of one dimension, over which is sharded; or of two, the first of which holds copies (HSDP).
        config: stage, offload, types, prefetch.
        precision: of the run; on GPUs with bf16, the blocks' parameters are gathered in bf16 unless `config` says
            otherwise.

    Raises:
        UserError: a parameter is a single number without a dimension to be cut along.
    """
    make_gradients_dense(module)
    check_dimensions(module)
    all_blocks = [block for _, block in blocks_of(module)]
    under_autocast = precision != "fp32"
    policy = MixedPrecisionPolicy(
        _gather_dtype(config, mesh.device_type, precision),
        _DTYPES[config.reduce_dtype],
        cast_forward_inputs=not under_autocast,
    )
    if under_autocast and policy.param_dtype is not None and mesh.device_type == "cpu":
        for block in all_blocks:
            _cast_inputs_of_norms(block)
    blocks, outside = _gathered_apart(module, all_blocks)
    root_policy = dataclasses.replace(
        policy,
        param_dtype=None if under_autocast else policy.param_dtype,
        # A batch's weights and floating targets keep their type: they are for the loss, not for the model.
        cast_forward_inputs=policy.cast_forward_inputs and not isinstance(module, StepModule),
    )
    stage = config.zero_stage or 3
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": OffloadPolicy()}
    if config.cpu_offload:
        # Memory is pinned for a device; without one torch refuses to pin it.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for block in blocks:
        elsewhere = outside.intersection(block.parameters()) or None
        fully_shard(block, reshard_after_forward=stage == 3, mp_policy=policy, ignored_params=elsewhere, **options)
    # The backward pass begins where the forward ends.
    fully_shard(module, reshard_after_forward=False, mp_policy=root_policy, **options)
    module.zero_stage = stage  # type: ignore[assignment]  # for `accumulate`
    for part in sharded_parts(module):
        # A sum, by an operation that all backends have: a factor alone needs one that only NCCL has.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        if mesh.device_type == "cpu":
            # Without streams only an asynchronous collective overlaps with the computation.
            part._set_unshard_async_op(True)
    if config.prefetch_blocks:
        _prefetch(module, blocks, config.prefetch_blocks)
    module.register_forward_hook(_reshard_after_inference)


def cast_as_gathered(model: nn.Module, config: ParallelConfig, device_type: str, precision: str) -> None:
    """Give a whole model that is not trained weights of the types that `apply_fsdp` would gather them in."""
    dtype = _gather_dtype(config, device_type, precision)
    if dtype is None:
        return
    all_blocks = [block for _, block in blocks_of(model)]
    blocks, outside = _gathered_apart(model, all_blocks)
    if precision == "fp32":
        blocks, outside = [model], set()
    elif device_type == "cpu":
        for block in all_blocks:
            _cast_inputs_of_norms(block)
    for parameter in {parameter for block in blocks for parameter in block.parameters()} - outside:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def sharded_parts(module: nn.Module) -> list[FSDPModule]:
    """The module itself and those of its parts that are gathered on their own."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, each process holds the whole parameters, so that parts of the module can be called apart, and as often as
    each process likes. There is nothing to do for a module that is not sharded.

    Args:
        module: as `apply_fsdp` left it, after a forward pass.
    """
    parts = sharded_parts(module)
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not module and getattr(module, "zero_stage", 3) == 3, recurse=False)
            part.reshard()


def accumulate(module: FSDPModule, last: bool) -> None:
    """Prepare for a micro-batch's forward and backward pass.

    Args:
        module: as `apply_fsdp` left it.
        last: whether it is the last one of its update.
    """
    stage = getattr(module, "zero_stage", 1)
    # Set for each micro-batch: stages differ in what a process keeps whole until the last one.
    module.set_requires_gradient_sync(last or stage > 1)
    module.set_requires_all_reduce(last)  # between copies of the model, once per update at any stage
    module.set_reshard_after_backward(last or stage == 3)


def check_dimensions(module: nn.Module) -> None:
    """Refuse parameters that cannot be sharded.

    Raises:
        UserError: one is a single number without a dimension to be cut along.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise UserError(
                f"{name} is a parameter without dimensions, of shape []; parameters are sharded along their first "
                f"dimension: give it the shape [1]"
            )


def _gathered_apart(module: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[nn.Module], set[nn.Parameter]]:
    """The blocks to be gathered on their own, and the parameters in no block, which some of them may use, too."""
    apart = list(blocks)
    while True:
        outside = {parameter for part in _outside(module, set(apart)) for parameter in part._parameters.values()}
        outside.discard(None)
        seen: dict[nn.Parameter, nn.Module] = {}
        for block in apart:
            inside = [parameter for parameter in block.parameters() if parameter not in outside]
            if shared := next((seen[parameter] for parameter in inside if parameter in seen), None):
                apart.remove(shared)
                break
            seen |= dict.fromkeys(inside, block)
        else:
            own = [block for block in apart if set(block.parameters()) - outside]
            return own, outside  # type: ignore[return-value]


def _outside(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Parts of a module that are reached without going through a block."""
    if module in blocks:
        return
    yield module
    for child in module.children():
        yield from _outside(child, blocks)


def _prefetch(module: nn.Module, blocks: Sequence[nn.Module], count: int) -> None:
    """Forward: each part gathers the next `count` blocks; backward: the `count` blocks before it."""
    parts: list[Any] = [module, *blocks]
    for place, part in enumerate(parts):
        part.set_modules_to_forward_prefetch(parts[place + 1 : place + 1 + count])
    backwards: list[Any] = [module, *reversed(blocks)]
    for place, part in enumerate(backwards):
        part.set_modules_to_backward_prefetch(backwards[place + 1 : place + 1 + count])


def _reshard_after_inference(module: nn.Module, arguments: Any, output: Any) -> None:
    """After a forward pass that no backward pass follows.

    FSDP2 leaves gathered what it would need there. A parameter that changes next (moving average, loading) would be
    changed in its share, and the stale gathered values used on.
    """
    if not torch.is_grad_enabled():
        for part in sharded_parts(module):
            part.reshard()


def _cast_inputs_of_norms(block: nn.Module) -> None:
    """On a GPU autocast has norms computed in float32, whatever they are given; on a CPU it leaves them alone, where
    the kernels take no float32 with weights in bf16."""
    for norm in block.modules():
        if isinstance(norm, nn.LayerNorm | nn.GroupNorm) and norm.weight is not None:
            norm.register_forward_pre_hook(_to_weight_dtype)


def _to_weight_dtype(norm: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(argument.to(norm.weight.dtype) for argument in arguments)  # type: ignore[arg-type]


def _gather_dtype(config: ParallelConfig, device_type: str, precision: str) -> torch.dtype | None:
    """None: the parameters' own."""
    if config.weights != "auto":
        return _DTYPES[config.weights]
    return torch.bfloat16 if precision == "bf16" and device_type == "cuda" else None
