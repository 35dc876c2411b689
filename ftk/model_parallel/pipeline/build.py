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
from ftk.model_parallel.pipeline.stages import Part, cut_model
from ftk.model_parallel.shards import local
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
        engine: activation checkpointing and compilation.
        update_freq: micro-batches of an update.
        precision: of the run.
        seed: of the initial values.
        fill: off: a checkpoint will fill the parameters.

    Returns:
        What takes the steps. Its `part.model` has the parameters that are this process's, for the optimizer, by the
        names of the whole model; in part.copies are those that another process saves.

    Raises:
        UserError: the model cannot be cut in this way, the criterion takes more than one pass, or the schedule cannot
            run with this number of micro-batches.
    """
    layout = check_pipeline(parallel, engine, len(getattr(model, "layers", ())), update_freq)
    group = world.group("pipeline")
    assert group is not None
    part = cut_model(model, layout, world.pipeline_rank)
    # The residual path is float32 under every precision, as on one process: rounded at the border of a stage to what
    # bf16 leaves of it, losses would be other ones. (Megatron, whose residual path is bf16 by default, sends half.)
    hidden_dtype = next(model.parameters()).dtype
    # The gradients of an update stay whole on their processes until its last micro-batch, and so do the parameters:
    # torch's schedules keep FSDP2 from gathering them anew for each of the passes, which do not come in pairs.
    shared = dataclasses.replace(parallel, zero_stage=1)
    if zero_bubble := parallel.pipeline_schedule == "zero-bubble":
        shared.weights = "fp32"  # see `check_pipeline`; autocast makes it bf16 under `precision` bf16
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
        spread = parallelize_training(stage, world, shared, engine, precision=precision, seed=seed, fill=fill)
        stages.append(stage)
        finishers += spread.finishers
    finishers += _tied_sums(part, group)
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


def _tied_sums(part: Part, group: dist.ProcessGroup) -> list[Callable[[], None]]:
    """What sums the gradients of the parameters that the first and the last stage hold, where this is one of the two.

    Called after FSDP2 has put other parameters in the place of those that were cut.
    """
    peer = {0: part.layout.last_rank, part.layout.last_rank: 0}.get(part.rank)
    if not part.tied or peer is None:
        return []
    parameters = dict(part.model.named_parameters())
    return [functools.partial(_sum_tied_gradients, [parameters[name] for name in sorted(part.tied)], peer, group)]


@torch.no_grad()
def _sum_tied_gradients(parameters: Sequence[nn.Parameter], peer: int, group: dist.ProcessGroup) -> None:
    """Give both holders of tied parameters the sum of their gradients, bit for bit the same; once per update.

    The initial values are equal, as they are functions of the name. With equal gradients, clipped by one norm, the
    optimizers of both ranks keep them so. The other ranks take no part.

    Args:
        parameters: in the same order on both ranks; sharded in the same way, if they are.
        peer: the other rank in the group.
        group: of the pipeline.
    """
    other = dist.get_global_rank(group, peer)
    # One after the other: both at once need a batch, and the first batch of an NCCL group all of its processes.
    sends_first = dist.get_rank(group) < peer
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        own = _local_gradient(parameter)
        received = torch.empty_like(own, memory_format=torch.contiguous_format)
        if sends_first:
            dist.send(own.contiguous(), other, group=group)
        dist.recv(received, other, group=group)
        if not sends_first:
            dist.send(own.contiguous(), other, group=group)
        own.add_(received)


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, to be added to in place; zeros where the parameter was not used."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    own: Tensor = local(parameter.grad)
    return own
