"""Whether a run can be spread over its processes as its options say; asked before any of them waits for another."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from ftk.errors import UserError
from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.world import Sizes, launched_by_torchrun, resolve_device, resolve_sizes
from ftk.optim.parameter_groups import apply_freeze
from ftk.tasks.base import Task
from ftk.trainer.config import TrainConfig

if TYPE_CHECKING:
    from ftk.model_parallel.pipeline.layout import PipelineLayout

logger = logging.getLogger(__name__)


def check_parallel(config: TrainConfig, task: Task) -> Sizes:
    """Refuse what cannot be spread as the options say, with the numbers: before any process waits for another.

    Args:
        config: the model's completed by the task.
        task: builds the model, on the meta device.

    Returns:
        How many processes there are along each dimension; for --dry-run alone as many as the options need.

    Raises:
        UserError: sizes do not go with the number of processes, heads, layers, schedule or micro-batches, or an option
            is for another way of sharing the work than they give.
    """
    parallel = config.parallel
    num_processes = int(os.environ["WORLD_SIZE"]) if launched_by_torchrun() else 1
    if config.command.dry_run and not launched_by_torchrun():
        given = (parallel.data_parallel_shard_size, parallel.data_parallel_replicate_size)
        num_processes = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        num_processes *= (given[0] or 1) * (given[1] or 1)
    sizes = resolve_sizes(parallel, num_processes)
    _check_offload(config)
    _check_that_all_counts(parallel, sizes)
    if sizes.pipeline == sizes.tensor == 1:
        return sizes
    with torch.device("meta"):
        model = task.build_model(config.model)
    if sizes.tensor > 1:
        from ftk.model_parallel.tensor_parallel.plan import match_plan, plan_of

        match_plan(model, plan_of(model, sizes.tensor), sizes.tensor, parallel.sequence_parallel)
    if sizes.pipeline > 1:
        from ftk.model_parallel.pipeline.layout import check_pipeline

        layers = getattr(model, "layers", ())
        layout = check_pipeline(parallel, config.engine, len(layers), config.training.update_freq)
        if config.parameters.freeze:
            _check_that_all_train(config, model, layout)
    return sizes


def _check_offload(config: TrainConfig) -> None:
    """Refuse what would mix tensors of the host and of a GPU in the optimizer's step."""
    if not config.parallel.cpu_offload or resolve_device(config.common.device).type != "cuda":
        return
    if config.training.precision == "fp16":
        raise UserError(
            "--cpu-offload keeps gradients on the host, where fp16's loss scale is not; use --precision bf16"
        )
    if config.optimizer.name in ("muon", "composite"):
        raise UserError(
            f"--cpu-offload keeps parameters on the host, --optimizer {config.optimizer.name} needs them whole on the "
            f"GPU; use --optimizer adamw"
        )


def _check_that_all_counts(parallel: ParallelConfig, sizes: Sizes) -> None:
    """Refuse an option that the sizes, now that all are known, would leave without a meaning.

    The command of a process alone is that of several without torchrun: there it is only said.

    Raises:
        UserError: an option is for another way of sharing the work.
    """
    of_copies, of_shares = list(_given_for_copies(parallel)), list(_given_for_shares(parallel))
    if sizes.world == 1:
        if given := [*of_copies, *of_shares]:
            logger.warning("%s: for several processes (torchrun); with this one it does nothing", ", ".join(given))
        return
    copies = sizes.replicate == sizes.world and not parallel.cpu_offload
    mesh = " x ".join(f"{name} {size}" for name, size in sizes._asdict().items() if size > 1)
    if of_copies and not copies:
        raise UserError(
            f"{of_copies[0]} is for copies of the whole model, and the processes are {mesh}; leave it out, or give "
            f"--data-parallel-replicate-size {sizes.world}"
        )
    if of_shares and (copies or (sizes.data == 1 and not parallel.cpu_offload)):
        raise UserError(
            f"{of_shares[0]} is for parameters that are shared out, and the processes are {mesh}; leave it out, or "
            f"give --data-parallel-shard-size"
        )
    if sizes.pipeline > 1 and sizes.shard > 1 and parallel.zero_stage != 1:
        if parallel.zero_stage == 2:
            raise UserError("--zero-stage 2: a pipeline keeps whole gradients until an update ends; use --zero-stage 1")
        logger.info("in a pipeline only the optimizer's state stays shared out during an update, as by --zero-stage 1")


def _given_for_copies(parallel: ParallelConfig) -> Iterator[str]:
    if parallel.gradient_compression != "none":
        yield f"--gradient-compression {parallel.gradient_compression}"
    if parallel.find_unused_parameters:
        yield "--find-unused-parameters"


def _given_for_shares(parallel: ParallelConfig) -> Iterator[str]:
    usual = ParallelConfig()
    for name in ("zero_stage", "gather_dtype", "reduce_dtype", "prefetch_blocks"):
        if (value := getattr(parallel, name)) != getattr(usual, name):
            yield f"--{name.replace('_', '-')} {value}"


def _check_that_all_train(config: TrainConfig, model: nn.Module, layout: PipelineLayout) -> None:
    """Refuse a pipeline of which a process would have no parameter to train: there is no optimizer of none.

    Args:
        model: whole, on the meta device; what is frozen is frozen in it.
    """
    from ftk.model_parallel.pipeline.stages import cut_model

    apply_freeze(model, config.parameters)
    for rank in range(layout.num_ranks):
        if not any(parameter.requires_grad for parameter in cut_model(model, layout, rank).model.parameters()):
            layers = ", ".join(str(layer) for stage in layout.stages_of(rank) for layer in layout.layers_of(stage))
            raise UserError(
                f"--freeze leaves process {rank} of the pipeline, with the layers {layers}, nothing to train; give it "
                f"others too by --pipeline-layers, or take fewer processes"
            )
