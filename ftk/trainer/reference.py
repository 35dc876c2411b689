"""The reference of a run that learns preferences: which model that is, and its weights."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ftk.checkpoint import read_config, resolve_model
from ftk.checkpoint.adapter import adapter_in
from ftk.config.build import as_mapping
from ftk.criterions.base import Criterion
from ftk.criterions.preference import Preference, PreferenceLossConfig
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
    if not isinstance(options, PreferenceLossConfig) or not options.compares:
        return config
    before = as_mapping("criterion", (config_of_run(config) or {}).get("criterion"))
    path = _usual_reference(config, before) if options.reference is None else options.reference
    if path is None:
        if config.adapter.config.train_also:
            raise UserError(
                "`train_also` changes weights of the model that preferences are compared with; name that by `reference`"
            )
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
            f"`preference_loss` {config.criterion.config.preference_loss} compares the model with a reference; name "
            f"the one that both start from by `finetune_from`, or another by `reference`"
        )
    return start


def give_reference(criterion: Criterion, world: World, config: TrainConfig | None = None) -> None:
    """Load the reference of a criterion that needs one, whole on each rank.

    Args:
        config: of a run, as of `frozen`.
    """
    if not isinstance(criterion, Preference) or not criterion.config.compares:
        return
    if world.sizes.tensor * world.sizes.pipeline > 1:
        refuse_shares(criterion.config)
    if criterion.config.reference is not None:
        reference = on_main(world, lambda: checkpoint_of("reference", criterion.config.reference))
        criterion.reference = frozen(reference, world, config)
        logger.info("preferences are compared with %s", reference)


def refuse_shares(options: Any) -> None:
    """Refuse a criterion that needs a reference for processes that share the layers of a model; of its options."""
    if isinstance(options, PreferenceLossConfig) and options.compares:
        raise UserError(
            f"`preference_loss` {options.preference_loss} needs the whole reference on each process, and "
            f"`tensor_parallel_size` and `pipeline_parallel_size` share models out; use data parallel alone"
        )
