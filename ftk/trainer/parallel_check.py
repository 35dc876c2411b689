"""Checks of the options of parallel training, before the ranks connect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from ftk.errors import UserError
from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.engine import check_residual
from ftk.model_parallel.world import Sizes, launched_processes, resolve_device, resolve_sizes
from ftk.tasks.base import Task
from ftk.trainer.adapters import adapt_and_freeze
from ftk.trainer.config import TrainConfig
from ftk.trainer.reference import refuse_shares

if TYPE_CHECKING:
    from ftk.model_parallel.pipeline.layout import PipelineLayout

logger = logging.getLogger(__name__)


def check_parallel(config: TrainConfig, task: Task) -> Sizes:
    """Refuse options of parallel training that do not fit the model or the number of processes.

    Args:
        config: of the run, with the model's configuration completed by the task.
        task: builds the model, on the meta device.

    Returns:
        The number of processes along each dimension; for `dry_run` without torchrun, as many as the options need.

    Raises:
        UserError: sizes do not fit the number of processes, heads, layers, the schedule or the number of micro-batches,
            or an option is for another kind of parallelism.
    """
    parallel = config.parallel
    launched = launched_processes()
    num_processes = launched or 1
    if config.command.dry_run and launched is None:
        given = (parallel.data_parallel_shard_size, parallel.data_parallel_replicate_size)
        num_processes = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        num_processes *= (given[0] or 1) * (given[1] or 1)
    sizes = resolve_sizes(parallel, num_processes)
    _check_types(config)
    _check_options_apply(parallel, sizes)
    is_whole, lowers_residual = sizes.pipeline == sizes.tensor == 1, config.engine.residual_precision == "same"
    if is_whole and not lowers_residual:
        return sizes
    if not is_whole:
        _refuse_whole_models(config)
    with torch.device("meta"):
        model = task.build_model(config.model)
    if lowers_residual:
        check_residual(model)
    if is_whole:
        return sizes
    adapt_and_freeze(model, config)
    _check_loss_form(config, model, sizes.tensor)
    if sizes.tensor > 1:
        from ftk.model_parallel.tensor_parallel.plan import match_plan, plan_of

        match_plan(model, plan_of(model, sizes.tensor), sizes.tensor, parallel.sequence_parallel)
    if sizes.pipeline > 1:
        from ftk.model_parallel.blocks import refuse_added_tokens
        from ftk.model_parallel.pipeline.layout import check_pipeline
        from ftk.model_parallel.pipeline.stages import cut_model, layers_of

        refuse_added_tokens(model, "pipeline_parallel_size")
        shares_bias = getattr(model, "ADDS_BIAS", False)
        num_layers, update_freq = len(layers_of(model)), config.training.update_freq
        layout = check_pipeline(parallel, config.engine, num_layers, update_freq, shares_bias=shares_bias)
        cut_model(model, layout, 0)  # on the meta device: whether it can be cut
        if not all(parameter.requires_grad for parameter in model.parameters()):
            _check_ranks_train(model, layout)
    return sizes


def _check_types(config: TrainConfig) -> None:
    """Refuse options that would mix types, or tensors of the host and of a GPU in the optimizer's step."""
    if config.parallel.weights == "bf16" and config.training.precision == "fp16":
        raise UserError("`weights` bf16 are less precise than `precision` fp16; use `precision` bf16 or fp32")
    if not config.parallel.cpu_offload or resolve_device(config.common.device).type != "cuda":
        return
    if config.training.precision == "fp16":
        raise UserError(
            "`cpu_offload` keeps gradients on the host, but fp16's loss scale is on the GPU; use `precision` bf16"
        )
    if config.optimizer.name == "muon":
        raise UserError(
            "`cpu_offload` keeps parameters on the host, but `optimizer` muon needs whole ones on the GPU; use "
            "`optimizer` adamw"
        )


def _check_options_apply(parallel: ParallelConfig, sizes: Sizes) -> None:
    """Refuse options that have no effect with these sizes; with one process (no torchrun), only warn."""
    for_replicas = list(_options_for_replicas(parallel))
    for_shards = [] if parallel.needs_fsdp else list(_options_for_shards(parallel))
    if sizes.world == 1:
        if given := [*for_replicas, *for_shards]:
            logger.warning("%s: for several processes (torchrun); no effect on one process", ", ".join(given))
        return
    copies = sizes.replicate == sizes.world and not parallel.needs_fsdp
    mesh = " x ".join(f"{name} {size}" for name, size in sizes._asdict().items() if size > 1)
    if for_replicas and not copies:
        raise UserError(
            f"{for_replicas[0]} is for replicas of the whole model, but the mesh is {mesh}; leave it out, or give "
            f"`data_parallel_replicate_size` {sizes.world}"
        )
    if for_shards and (copies or sizes.data == 1):
        raise UserError(
            f"{for_shards[0]} is for sharded parameters, but the mesh is {mesh}; leave it out, or "
            f"give `data_parallel_shard_size`"
        )
    if sizes.pipeline > 1 and (sizes.shard > 1 or parallel.needs_fsdp) and (stage := parallel.zero_stage or 1) > 1:
        whole = "gradients" if stage == 2 else "parameters"
        raise UserError(
            f"`zero_stage` {stage}: a pipeline keeps whole {whole} until an update ends; use `zero_stage` 1"
        )


def _refuse_whole_models(config: TrainConfig) -> None:
    """Refuse what needs more of a model on each process than processes have that share its layers."""
    if config.distillation.teacher is not None:
        raise UserError(
            "`teacher` needs the whole model on each process, which `tensor_parallel_size` and "
            "`pipeline_parallel_size` share out; use data parallel alone"
        )
    refuse_shares(config.criterion)
    if not config.evaluations.evaluate_with:
        return
    if config.parallel.pipeline_parallel_size > 1 or config.parallel.sequence_parallel:
        option = "pipeline_parallel_size" if config.parallel.pipeline_parallel_size > 1 else "sequence_parallel"
        raise UserError(
            f"`evaluate_with` needs all layers and whole sequences on each process, which `{option}` shares out; use "
            f"`tensor_parallel_size` without it, or data parallel"
        )


def _options_for_replicas(parallel: ParallelConfig) -> Iterator[str]:
    if parallel.gradient_compression != "none":
        yield f"`gradient_compression` {parallel.gradient_compression}"
    if parallel.find_unused_parameters:
        yield "`find_unused_parameters`"


def _options_for_shards(parallel: ParallelConfig) -> Iterator[str]:
    usual = ParallelConfig()
    for name in ("zero_stage", "weights", "reduce_dtype", "prefetch_blocks"):
        value = getattr(parallel, name)
        if value != getattr(usual, name):
            yield f"`{name}` {value}"


def _check_loss_form(config: TrainConfig, model: nn.Module, tensor_size: int) -> None:
    from ftk.criterions.base import trunk_and_head
    from ftk.criterions.loss_forms import check_form

    if (form := getattr(config.criterion.config, "loss_form", None)) is not None:
        check_form(form, trunk_and_head(model)[1], tensor_size)


def _check_ranks_train(model: nn.Module, layout: PipelineLayout) -> None:
    """Refuse a pipeline in which a rank would have no parameter to train: an optimizer needs at least one.

    Args:
        model: the whole one, on the meta device; `freeze` is applied.
    """
    from ftk.model_parallel.pipeline.stages import cut_model

    for rank in range(layout.num_ranks):
        if not any(parameter.requires_grad for parameter in cut_model(model, layout, rank).model.parameters()):
            layers = ", ".join(str(layer) for stage in layout.stages_of(rank) for layer in layout.layers_of(stage))
            raise UserError(
                f"`freeze` leaves rank {rank} of the pipeline, with the layers {layers}, no parameter to train; give "
                f"it other layers by `pipeline_layers`, or use fewer ranks"
            )
