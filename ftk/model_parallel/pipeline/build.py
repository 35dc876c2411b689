"""From a whole model, best on the meta device, to this process's part of its pipeline and what runs it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.parallelize import parallelize_training
from ftk.model_parallel.pipeline.layout import check_pipeline
from ftk.model_parallel.pipeline.runner import PipelineRunner
from ftk.model_parallel.pipeline.stage_module import Stage
from ftk.model_parallel.pipeline.stages import Part, cut_model, layers_of
from ftk.model_parallel.shards import local
from ftk.model_parallel.step_module import LOW_PRECISIONS
from ftk.model_parallel.world import World


def build_pipeline(
    model: nn.Module,
    criterion: Any,
    world: World,
    parallel: ParallelConfig,
    engine: EngineConfig,
    *,
    update_freq: int,
    precision: str = "fp32",
    seed: int | None = None,
    fill: bool = True,
) -> PipelineRunner:
    """Cut a model into stages, and make this process's ready to be trained, as `parallelize_training` does.

    Args:
        model: whole; on the meta device, so that no process ever holds more than its part. Which parameters are frozen
            is to be settled before.
        criterion: computes the loss (`ftk.criterions.base.Criterion`), in one pass.
        world: with more than one process along the pipeline.
        parallel: schedule and layout, and how parameters are shared out besides.
        fill: off: a checkpoint will fill the parameters.

    Returns:
        What takes the steps. Its `part.model` has the parameters that are this process's, for the optimizer, by the
        names of the whole model; in part.copies are those that another process saves.

    Raises:
        UserError: the model cannot be cut in this way, the criterion takes more than one pass, or the schedule cannot
            run with this number of micro-batches.
    """
    shares_bias = getattr(model, "ADDS_BIAS", False)
    layout = check_pipeline(parallel, engine, len(layers_of(model)), update_freq, shares_bias=shares_bias)
    group = world.group("pipeline")
    assert group is not None
    part = cut_model(model, layout, world.pipeline_rank)
    hidden_dtype = _hidden_dtype(model, engine, precision)
    # The gradients of an update stay whole on their processes until its last micro-batch, and so do the parameters:
    # torch's schedules keep FSDP2 from gathering them anew for each of the passes, which do not come in pairs.
    shared = dataclasses.replace(parallel, zero_stage=1)
    if zero_bubble := parallel.pipeline_schedule == "zero-bubble":
        shared.weights = "fp32"  # see `check_pipeline`; autocast makes it bf16 under `precision` bf16
        if engine.compile == "auto":
            engine = dataclasses.replace(engine, compile="none")
    stages: list[Stage] = []
    finishers: list[Callable[[], None]] = []
    for index, own in zip(layout.stages_of(part.rank), part.stages, strict=True):
        stage = Stage(
            own,
            criterion,
            index,
            layout.num_stages,
            precision=precision,
            hidden_dtype=hidden_dtype,
            loss_apart=zero_bubble,
        )
        parallelized = parallelize_training(stage, world, shared, engine, precision=precision, seed=seed, fill=fill)
        stages.append(stage)
        finishers += parallelized.finishers
    finishers += _shared_sums(part, group)
    return PipelineRunner(
        part,
        stages,
        schedule=parallel.pipeline_schedule,
        num_micro_batches=update_freq,
        group=group,
        device=world.device,
        token_shards=world.sizes.tensor if parallel.sequence_parallel else 1,
        hidden_dtype=hidden_dtype,
        finishers=finishers,
    )


def _hidden_dtype(model: nn.Module, engine: EngineConfig, precision: str) -> torch.dtype:
    """Of hidden states between stages: that of the residual path on one process. Rounded at the border of a stage to
    what bf16 leaves of it, losses would be other ones."""
    own = next(model.parameters()).dtype
    return LOW_PRECISIONS.get(precision, own) if engine.residual_precision == "same" else own


def _shared_sums(part: Part, group: dist.ProcessGroup) -> list[Callable[[], None]]:
    """What sums the gradients of the parameters that this rank and others hold, if there are any.

    Called after FSDP2 has put other parameters in the place of those that were cut.
    """
    parameters = dict(part.model.named_parameters())
    shared = [(parameters[name], part.holders[name]) for name in sorted(part.holders.keys() & parameters.keys())]
    return [functools.partial(sum_shared_gradients, shared, part.rank, group)] if shared else []


@torch.no_grad()
def sum_shared_gradients(
    shared: Sequence[tuple[nn.Parameter, tuple[int, ...]]], rank: int, group: dist.ProcessGroup
) -> None:
    """Give all holders of shared parameters the sum of their gradients, bit for bit the same; once per update.

    The initial values are equal, as they are functions of the name. With equal gradients, clipped by one norm, the
    optimizers of these ranks keep them so. The other ranks take no part.

    Args:
        shared: this rank's of them, in an order that all ranks have in common, with the ranks that hold each; sharded
            in the same way, if they are.
    """
    # One after the other: several at once need a batch, and the first batch of an NCCL group all of its processes.
    for parameter, (first, *others) in shared:
        if not parameter.requires_grad:
            continue
        own = _local_gradient(parameter)
        buffer = own.clone(memory_format=torch.contiguous_format)
        if rank != first:
            dist.send(buffer, group=group, group_dst=first)
            dist.recv(buffer, group=group, group_src=first)
            own.copy_(buffer)
            continue
        for other in others:
            dist.recv(buffer, group=group, group_src=other)
            own.add_(buffer)
        buffer.copy_(own)
        for other in others:
            dist.send(buffer, group=group, group_dst=other)


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, to be added to in place; zeros where the parameter was not used."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    own: Tensor = local(parameter.grad)
    return own
