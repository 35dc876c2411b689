"""Which options may change when a run continues, and which parts of its state are reset."""

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
from ftk.optim.schedules import DecayConfig, LRScheduler, LRSchedulerConfig
from ftk.tasks.base import Task
from ftk.trainer.config import TrainConfig
from ftk.trainer.dataloading import DEFAULT_BATCH_SIZE, total_updates

logger = logging.getLogger(__name__)

_SIZES_READ = 1 << 20
_PLACES = ("criterion.reference", "distillation.teacher")


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
    """Log the options that changed since a checkpoint, and refuse changes that would silently change results.

    Args:
        before: the configuration in the checkpoint.
        folder: the checkpoint, for messages.
        own: whether it is in this run's folder, not another run's.
        data_before, data: `data_identity` then and now; None: not known.
        processes_before, processes: number of data-parallel ranks then and now.

    Returns:
        The parts that are not loaded from the checkpoint, of "optimizer", "lr_scheduler", "dataloader", "meters".

    Raises:
        UserError: an option has changed on which the state in the checkpoint depends, and its reset option is off.
    """
    changes = _with_data(_with_places(find_changes(before, config)), data_before, data)
    changes = _with_batches(changes, config, processes_before, processes)
    asked = {kind for kind in RESETTABLE if getattr(config.checkpoint, f"reset_{kind}")}
    refused = [change for change in changes if change.resume not in asked | {FREE}]
    if refused:
        raise UserError(_refusal(folder, refused, [change for change in changes if change not in refused]))
    for change in changes:
        logger.info("changed since this checkpoint: %s", change)
    resets = set()
    for kind in sorted(asked):
        # The same command continues a run; then the checkpoint's configuration shows that the reset is done.
        done = own and (before.get("checkpoint") or {}).get(f"reset_{kind}")
        if done and not any(change.resume == kind for change in changes):
            logger.info("%s: done when this run was continued with it before; not repeated", _flag(kind))
        else:
            goes_on = "; the new schedule goes on at the present update" if kind == "lr_scheduler" else ""
            logger.info("%s: its state is reset%s", _flag(kind), goes_on)
            resets.add(kind)
    return resets


def with_recipe_of_run(config: TrainConfig) -> TrainConfig:
    """The configuration with the values that the run in `save_dir`, or in `restore_from`, has in place of a recipe's.

    So a run that began before its architecture had a recipe, or with another one, goes on with the same command.
    """
    if not config.model.from_recipe or (before := config_of_run(config)) is None:
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


def config_of_run(config: TrainConfig) -> dict[str, Any] | None:
    """What the run in `save_dir`, or in `restore_from`, was configured with; None: there is none."""
    folder, source = Path(config.checkpoint.save_dir), config.checkpoint.restore_from
    if numbered_checkpoints(folder) and (folder / CONFIG).is_file():
        return load_yaml(folder / CONFIG)
    return None if source is None else read_config(source)


def describe_stretch(
    config: TrainConfig, before: dict[str, Any], updates_per_epoch: Sequence[int], num_updates: int
) -> str | None:
    """How a new length of the run changes the learning rate of a schedule that ends with it; None if it does not.

    Also None if the schedule itself has changed.

    Args:
        config, before: as of `check_changes`.
    """
    keys = [change.key for change in find_changes(before, config)]
    if any(key == "optimizer.lr" or key.startswith("lr_scheduler.") for key in keys):
        return None
    old: dict[str, Any] = before.get("training") or {}
    earlier = dataclasses.replace(config.training, max_update=old.get("max_update"), max_epoch=old.get("max_epoch"))
    old_length, length = (total_updates(training, updates_per_epoch) for training in (earlier, config.training))
    if old_length is None or length is None or old_length == length:
        return None
    peak, chosen = config.optimizer.config.lr, config.lr_scheduler
    old_schedule, schedule = (chosen.build(base_lr=peak, total_updates=total) for total in (old_length, length))
    was, now = old_schedule.lr(num_updates), schedule.lr(num_updates)
    if was == now:
        return None
    kept = _options_that_keep(old_schedule, chosen, peak, range(num_updates, length))
    return (
        f"the schedule ends with the run, now at update {length} instead of {old_length}: the learning rate after "
        f"update {num_updates} is {now:.4g} instead of {was:.4g}"
        f"{f' ({kept} keep the old one)' if kept else ''}"
    )


def _options_that_keep(schedule: LRScheduler, chosen: Chosen, peak: float, updates: range) -> str:
    """What to give, so that a schedule goes on as it was in a run of another length; "" where nothing does that."""
    config = chosen.config
    if not isinstance(config, LRSchedulerConfig):
        return ""
    rises = schedule.warmup_updates
    fixed = {} if rises == config.warmup_updates else {"warmup_updates": rises}
    if isinstance(config, DecayConfig) and not config.given_updates():
        fixed["decay_updates"] = schedule.decay_updates
    same = dataclasses.replace(config, **{**fixed, "warmup_ratio": 0.0})
    try:
        kept = dataclasses.replace(chosen, config=same).build(base_lr=peak, total_updates=updates.stop)
    except UserError:  # they do not fit into a shorter run
        return ""
    if not fixed or any(kept.lr(update) != schedule.lr(update) for update in updates[:: len(updates) // 100 + 1]):
        return ""
    shown = " ".join(f"`{name}` {value}" for name, value in fixed.items())
    return f"{shown} `reset_lr_scheduler`{' without `warmup_ratio`' if config.warmup_ratio else ''}"


def data_identity(task: Task, split: str) -> str | None:
    """The number of a split's documents and a checksum of their sizes, which identify them in any folder.

    Of many documents only a sample of the sizes is used. None if the corpus has neither documents nor a `fingerprint`.
    """
    if hasattr(task.corpus, "fingerprint"):
        return task.corpus.fingerprint(split)
    documents = getattr(task.corpus, "documents", None)
    if documents is None:
        return None
    sizes = documents(split).sizes
    some = np.ascontiguousarray(sizes[:: -(-len(sizes) // _SIZES_READ) or 1])
    return f"{len(sizes)} documents, {zlib.crc32(some.tobytes()):08x}"


def _with_places(changes: Sequence[Change]) -> list[Change]:
    """The changes; another folder of a frozen model is allowed: it may have been moved."""
    return [
        dataclasses.replace(change, resume=FREE)
        if change.key in _PLACES and None not in (change.old, change.new)
        else change
        for change in changes
    ]


def _with_data(changes: Sequence[Change], before: str | None, now: str | None) -> list[Change]:
    """The changes, corrected by the identity of the data: another path may hold the same data."""
    if before is None or now is None:
        return list(changes)
    if before == now:  # moved, for example to a local disk
        return [
            Change(change.key, change.old, change.new, FREE) if change.key == "dataset.data" else change
            for change in changes
        ]
    return [*changes, Change("training data", before, now, "dataloader")]


def _with_batches(changes: Sequence[Change], config: TrainConfig, before: int, now: int) -> list[Change]:
    """The changes, with that of the number of batches per update, which depends on the number of processes.

    Without windows or `max_tokens` the order of samples does not depend on the batches: an update of as many samples
    has the same ones.
    """
    loader, update_freq = config.dataloader, config.training.update_freq
    key, size_key = "training.update_freq", "dataloader.batch_size"
    was = {change.key: change.old for change in changes}
    old = was.get(key, update_freq)
    wanted, each = old * before, now  # of which `update_freq` must make as many
    if size_key in was and not (loader.max_tokens or loader.bucket_window or loader.curriculum_updates):
        wanted, each = wanted * (was[size_key] or DEFAULT_BATCH_SIZE), each * (loader.batch_size or DEFAULT_BATCH_SIZE)
        if wanted == each * update_freq:
            same = (key, size_key)
            return [dataclasses.replace(change, resume=FREE) if change.key in same else change for change in changes]
    if before == now and size_key not in was:
        return list(changes)
    others = [change for change in changes if change.key != key]
    if old * before == update_freq * now and size_key not in was:
        return others
    keeps = f"; `update_freq` {wanted // each} keeps its samples" if wanted % each == 0 else ""
    new = f"{update_freq * now}{keeps}"
    return [*others, Change("batches of an update (`update_freq` x data parallel)", old * before, new, "dataloader")]


def _refusal(folder: Path, refused: Sequence[Change], others: Sequence[Change]) -> str:
    lines = [f"{folder} was made with other options; these would change the results of its run:"]
    for change in refused:
        way = "needs a new run" if change.resume == FIXED else f"{_flag(change.resume)} resets its state"
        lines.append(f"  {change}   ({way})")
    if others:
        lines.append("these also changed, and are allowed:")
        lines += [f"  {change}" for change in others]
    source = next((one.old for one in others if one.key == "checkpoint.finetune_from" and one.new is None), None)
    if source is not None and any(change.key.startswith("model.") for change in refused):
        lines.append(f"the run took its model's options from `finetune_from` {source}; give that again, or")
    lines.append(
        f"give the old values (see {folder / 'config.yaml'}), the options named above, or another `save_dir` with "
        f"`finetune_from` {folder} to load its weights"
    )
    return "\n".join(lines)


def _flag(kind: str) -> str:
    return f"`reset_{kind}`"
