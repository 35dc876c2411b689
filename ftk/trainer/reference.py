"""The reference that a criterion compares the model with: which model that is, and its weights."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ftk.checkpoint import read_config, resolve_model
from ftk.checkpoint.adapter import adapter_in
from ftk.config import Chosen
from ftk.config.build import as_mapping
from ftk.errors import UserError
from ftk.model_parallel.collective import on_main
from ftk.model_parallel.world import World
from ftk.trainer.config import TrainConfig
from ftk.trainer.resume import config_of_run
from ftk.trainer.teacher import check_frozen, checkpoint_of, frozen

if TYPE_CHECKING:
    from ftk.tasks.base import Task

logger = logging.getLogger(__name__)


def with_reference(config: TrainConfig, task: Task) -> TrainConfig:
    """The configuration with the checkpoint as `reference` that a run starts from, unless it names one.

    It stays None where the adapter is new: without it, the model is its own reference.

    Args:
        config: of the run, with the model's configuration completed by the task.

    Raises:
        UserError: there is no reference, or it cannot read what the task makes for the model that is trained.
    """
    options = config.criterion.config
    if not _compares(options):
        return config
    before = as_mapping("criterion", (config_of_run(config) or {}).get("criterion"))
    path = _usual_reference(config, before) if options.reference is None else options.reference
    if path is None:
        if config.adapter.config.train_also:
            raise UserError("`train_also` changes weights of the model that is the reference; name that by `reference`")
        return config
    reference = checkpoint_of("reference", path, before.get("reference"))
    check_frozen("reference", reference, config, task)
    criterion = dataclasses.replace(config.criterion, config=dataclasses.replace(options, reference=reference))
    return dataclasses.replace(config, criterion=criterion)


def _usual_reference(config: TrainConfig, before: Mapping[str, Any]) -> str | None:
    """What the run starts from, or has started from; None: the model without its adapter.

    Args:
        before: the criterion's options, if the run is continued.
    """
    if before.get("reference") is not None or ("reference" in before and config.adapter.name != "none"):
        return before["reference"]
    start = config.checkpoint.finetune_from
    if config.adapter.name != "none" and (start is None or adapter_in(read_config(resolve_model(start))) is None):
        return None
    if start is None:
        raise UserError(
            f"`criterion` {config.criterion.name} compares the model with a reference; name the one that both start "
            f"from by `finetune_from`, or another by `reference`"
        )
    return start


def load_reference(criterion: Any, chosen: Chosen, world: World, config: TrainConfig | None = None) -> None:
    """Load the reference of a criterion that needs one, whole on each rank.

    Args:
        chosen: what the criterion was built of.
        config: of a run, as of `frozen`.
    """
    if world.sizes.tensor * world.sizes.pipeline > 1:
        refuse_shares(chosen)
    if _compares(chosen.config) and chosen.config.reference is not None:
        reference = on_main(world, lambda: checkpoint_of("reference", chosen.config.reference))
        criterion.reference = frozen(reference, world, config)
        logger.info("the model is compared with %s", reference)


def refuse_shares(chosen: Chosen) -> None:
    """Refuse a criterion that needs a reference for processes that share the layers of a model."""
    if _compares(chosen.config):
        raise UserError(
            f"`criterion` {chosen.name} needs the whole reference on each process, and `tensor_parallel_size` and "
            f"`pipeline_parallel_size` share models out; use data parallel alone"
        )


def _compares(options: Any) -> bool:
    """Whether a criterion with these options needs a reference, see `Criterion`."""
    return getattr(options, "compares", False)
