"""Whether a run may go on with other options than it began with, and what begins anew with them."""

from __future__ import annotations

import dataclasses
import logging
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ftk.checkpoint import numbered_checkpoints, read_config
from ftk.checkpoint.layout import CONFIG
from ftk.config import Chosen
from ftk.config.changes import FIXED, FREE, RESETTABLE, Change, find_changes
from ftk.config.root import load_yaml
from ftk.errors import UserError
from ftk.tasks.base import Task
from ftk.trainer.config import TrainConfig
from ftk.trainer.dataloading import total_updates

logger = logging.getLogger(__name__)

_SIZES_READ = 1 << 20


def check_changes(
    config: TrainConfig,
    before: dict[str, Any],
    folder: Path,
    *,
    own: bool,
    data_before: str | None,
    data: str | None,
    processes_before: int = 1,
    processes: int = 1,
) -> set[str]:
    """Show what changed since a checkpoint was written, and refuse what would change the results silently.

    Args:
        config: of this run.
        before: the configuration in the checkpoint.
        folder: the checkpoint, for messages.
        own: whether it is of this run's folder, and no other run's.
        data_before, data: `data_identity` then and now; None: not known.
        processes_before, processes: that take batches of their own, then and now.

    Returns:
        What is not to be taken from the checkpoint: of "optimizer", "lr_scheduler", "dataloader", "meters".

    Raises:
        UserError: an option has changed on which the state in the checkpoint depends, and no reset is asked for.
    """
    changes = _with_data(find_changes(before, config), data_before, data)
    changes = _with_processes(changes, config.training.update_freq, processes_before, processes)
    asked = {kind for kind in RESETTABLE if getattr(config.checkpoint, f"reset_{kind}")}
    refused = [change for change in changes if change.resume not in asked | {FREE}]
    if refused:
        raise UserError(_refusal(folder, refused, [change for change in changes if change not in refused]))
    for change in changes:
        logger.info("changed since this checkpoint: %s", change)
    resets = set()
    for kind in sorted(asked):
        # The same command continues a run: then what it asks for is done already, and the checkpoint says so.
        done = own and (before.get("checkpoint") or {}).get(f"reset_{kind}")
        if done and not any(change.resume == kind for change in changes):
            logger.info("%s: was done when this run went on with it before; not again", _flag(kind))
        else:
            logger.info("%s: its state begins anew", _flag(kind))
            resets.add(kind)
    return resets


def with_recipe_of_run(config: TrainConfig) -> TrainConfig:
    """The configuration with the values that the run in `save_dir`, or in `restore_from`, has in place of a recipe's.

    So a run that began before its architecture had a recipe, or with another one, goes on with the same command.
    """
    folder, source = Path(config.checkpoint.save_dir), config.checkpoint.restore_from
    if not config.model.from_recipe:
        return config
    if numbered_checkpoints(folder) and (folder / CONFIG).is_file():
        before = load_yaml(folder / CONFIG)
    elif source is not None:
        before = read_config(source)
    else:
        return config
    kept: dict[str, Any] = {"model": dataclasses.replace(config.model, from_recipe={})}
    for key, taken in config.model.from_recipe.items():
        part, old = getattr(config, key), before.get(key) or {}
        values = {name: old[name] for name in taken if name in old}
        if not isinstance(part, Chosen):
            kept[key] = dataclasses.replace(part, **values)
        elif old.get("_name") == part.name:
            kept[key] = dataclasses.replace(part, config=dataclasses.replace(part.config, **values))
    return dataclasses.replace(config, **kept)


def describe_stretch(
    config: TrainConfig, before: dict[str, Any], updates_per_epoch: Sequence[int], num_updates: int
) -> str | None:
    """What another length of the run does to a schedule that ends with it; None if that stays as it was.

    Also None where the schedule itself is another one than before: then its old length says nothing.

    Args:
        config, before: as of `check_changes`.
        updates_per_epoch: of this run.
        num_updates: where it goes on.
    """
    keys = [change.key for change in find_changes(before, config)]
    if any(key == "optimizer.lr" or key.startswith("lr_scheduler.") for key in keys):
        return None
    old: dict[str, Any] = before.get("training") or {}
    earlier = dataclasses.replace(config.training, max_update=old.get("max_update"), max_epoch=old.get("max_epoch"))
    lengths = [total_updates(training, updates_per_epoch) for training in (earlier, config.training)]
    if lengths[0] == lengths[1] or None in lengths:
        return None
    peak = config.optimizer.config.lr
    was, now = (config.lr_scheduler.build(base_lr=peak, total_updates=length).lr(num_updates) for length in lengths)
    if was == now:
        return None
    return (
        f"the schedule ends with the run, now at update {lengths[1]} and not {lengths[0]}: the learning rate after "
        f"update {num_updates} is {now:.4g}, it was to be {was:.4g} "
        f"(`decay_updates` {lengths[0]} `reset_lr_scheduler` keep it)"
    )


def data_identity(task: Task, split: str) -> str | None:
    """What tells the documents of a split from others, wherever they lie: their number and their sizes.

    Of many documents only some are looked at. None where the corpus has no documents.
    """
    documents = getattr(task.corpus, "documents", None)
    if documents is None:
        return None
    sizes = documents(split).sizes
    some = np.ascontiguousarray(sizes[:: -(-len(sizes) // _SIZES_READ) or 1])
    return f"{len(sizes)} documents, {zlib.crc32(some.tobytes()):08x}"


def _with_data(changes: Sequence[Change], before: str | None, now: str | None) -> list[Change]:
    """The changes, with what is known of the data itself in place of what its path suggests."""
    if before is None or now is None:
        return list(changes)
    if before == now:  # moved, for example to a disk of the machine that the job runs on
        return [
            Change(change.key, change.old, change.new, FREE) if change.key == "dataset.data" else change
            for change in changes
        ]
    return [*changes, Change("training data", before, now, "dataloader")]


def _with_processes(changes: Sequence[Change], update_freq: int, before: int, now: int) -> list[Change]:
    """The changes, with what follows from another number of processes: batches of an update are theirs together."""
    if before == now:
        return list(changes)
    key = "training.update_freq"
    old = next((change.old for change in changes if change.key == key), update_freq)
    others = [change for change in changes if change.key != key]
    if old * before == update_freq * now:
        return others
    wanted = f"; `update_freq` {old * before // now} keeps them" if old * before % now == 0 else ""
    new = f"{update_freq * now}{wanted}"
    return [*others, Change("batches of an update (`update_freq` x data parallel)", old * before, new, "dataloader")]


def _refusal(folder: Path, refused: Sequence[Change], others: Sequence[Change]) -> str:
    lines = [f"{folder} was made with other options; with these its run would give other results:"]
    for change in refused:
        way = "another model or run" if change.resume == FIXED else f"{_flag(change.resume)} starts its state over"
        lines.append(f"  {change}   ({way})")
    if others:
        lines.append("these, given as well, could be taken:")
        lines += [f"  {change}" for change in others]
    lines.append(
        f"give the old values (they are in {folder / 'config.yaml'}), the options named above, or another `save_dir`, "
        f"with `finetune_from` {folder} for its weights"
    )
    return "\n".join(lines)


def _flag(kind: str) -> str:
    return f"`reset_{kind}`"
