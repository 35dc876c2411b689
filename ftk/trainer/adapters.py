"""The adapter of a run on its model, whose weights may be quantised; and which parameters are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ftk.checkpoint import read_config
from ftk.checkpoint.quantize import QUANTIZATION
from ftk.errors import UserError
from ftk.model_parallel.collective import on_main
from ftk.model_parallel.data_parallel import uses_fsdp
from ftk.model_parallel.world import World
from ftk.modules.adapters.adapt import Adapter, adapt, part_names
from ftk.modules.adapters.p_tuning import refuse_stages
from ftk.modules.classifier import is_of_head
from ftk.optim.parameter_groups import apply_freeze, train_only
from ftk.trainer.config import TrainConfig


def adapt_and_freeze(model: nn.Module, config: TrainConfig) -> Adapter | None:
    """Put the run's adapter on its model, if it has one, and freeze what is not trained.

    Args:
        model: whole, also on the meta device; before it is parallelized, and before its weights are loaded.

    Raises:
        UserError: a pattern matches nothing, nothing is left to train, or the ranks cannot share the adapter.
    """
    adapter: Adapter | None = config.adapter.build()
    if adapter is not None:
        refuse_stages(adapter, config.parallel.pipeline_parallel_size, config.parallel.sequence_parallel)
        adapt(model, adapter, config.common.seed)
        names = [name for name, _ in model.named_parameters()]
        train_only(model, [*part_names(names, adapter), *filter(is_of_head, names)], adapter.config.train_also)
    apply_freeze(model, config.parameters)
    return adapter


def quantization_of_base(config: TrainConfig, found: Path | None, world: World) -> dict[str, Any]:
    """The section `quantization` of config.yaml for a run that trains an adapter beside quantised weights.

    Args:
        found: the checkpoint that the run continues from; None: it is new.

    Returns:
        For `ftk.checkpoint.quantize.prepare_for`, and for the run's checkpoints; empty where nothing is quantised.

    Raises:
        UserError: an adapter has no trained weights to start from; or ranks cannot share quantised ones.
    """
    source = found or config.checkpoint.finetune_from
    if config.adapter.name == "none":
        return {}
    if source is None:
        raise UserError(
            f"`adapter` {config.adapter.name} is trained beside frozen weights, and this run would start with random "
            f"ones; name a checkpoint by `finetune_from`"
        )
    section = on_main(world, lambda: read_config(source).get(QUANTIZATION))
    if section is None:
        return {}
    if world.sizes.tensor > 1 or world.sizes.pipeline > 1:
        raise UserError(
            f"{source} has quantised weights, which tensor and pipeline parallel ranks cannot share; use data "
            f"parallel, or the checkpoint that it was made of"
        )
    if getattr(config.adapter.config, "weight_decomposed", False) and uses_fsdp(world, config.parallel):
        raise UserError(
            f"`weight_decomposed` on the quantised weights of {source} cannot be sharded; use "
            f"`data_parallel_replicate_size`"
        )
    return {QUANTIZATION: section}
