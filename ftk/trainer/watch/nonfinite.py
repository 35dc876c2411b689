"""Reports updates that were skipped because loss or gradient was not finite, with their samples."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ftk.batch import Batch
from ftk.errors import counted
from ftk.model_parallel.world import World
from ftk.optim.loss_scaler import LossScaler
from ftk.trainer.hooks import Hook, StepInfo
from ftk.trainer.log.records import Record

logger = logging.getLogger(__name__)

CAPACITY = 4096  # updates since the last record whose samples are stored
_UPDATES_SHOWN, _IDS_SHOWN = 8, 32


class _Update(NamedTuple):
    num_updates: int
    epoch: int
    sample_ids: list[NDArray[np.int64]]  # of each micro-batch, int64 [B]


class SkippedUpdates(Hook):
    """Warns of skipped updates at the next training record or before a checkpoint: loss or gradient, and samples.

    Until then the flags stay on the device, so that no update waits for it. Overflows of scaled fp16 gradients are part
    of the search for the scale: they are counted in one line without a warning.

    Args:
        scaler: of fp16 losses, None without one.
        capacity: number of updates since the last record whose samples are stored.
    """

    def __init__(self, scaler: LossScaler | None = None, capacity: int = CAPACITY) -> None:
        self._scaler = scaler
        self._recent: deque[_Update] = deque(maxlen=capacity)
        self._flags: Tensor | None = None  # [capacity, 2] bool: skipped; loss not finite. Row: num_updates % capacity
        self._skipped: Tensor | int = 0  # number since the last record, on the device
        self._capacity = capacity
        self._sample_ids: list[NDArray[np.int64]] = []

    def before_step(self, step: StepInfo, micro_batches: list[Batch]) -> None:
        self._sample_ids = [batch.sample_ids for batch in micro_batches if batch.sample_ids is not None]

    def after_step(self, step: StepInfo) -> None:
        if self._flags is None:
            self._flags = torch.zeros(self._capacity, 2, dtype=torch.bool, device=step.device)
        assert step.skip is not None
        loss = step.sums.get("loss")  # a stage of a pipeline may have none
        loss_is_bad = torch.zeros_like(step.skip) if loss is None else ~loss[0].isfinite()
        self._flags[step.num_updates % self._capacity] = torch.stack([step.skip, loss_is_bad])
        self._skipped = self._skipped + step.skip
        self._recent.append(_Update(step.num_updates, step.epoch, self._sample_ids))

    def on_record(self, step: StepInfo, record: Record) -> None:
        if record["event"] == "train":
            self._report(step.world)

    def before_checkpoint(self, step: StepInfo) -> None:
        if self._recent:  # a process that continues from it cannot report them
            self._report(step.world)

    def _report(self, world: World) -> None:
        count, self._skipped = int(self._skipped), 0
        if count and self._flags is not None:
            flags = self._flags.tolist()
            known = [(update, flags[update.num_updates % self._capacity][1]) for update in self._recent]
            known = [(update, bad_loss) for update, bad_loss in known if flags[update.num_updates % self._capacity][0]]
            known = _merged(known, world)
            if self._scaler is not None:
                overflows = sum(not bad_loss for _, bad_loss in known)
                if overflows:
                    scale = self._scaler.scale.item()
                    logger.info(
                        "fp16 overflowed in %s, skipped; the loss scale is %g", counted(overflows, "update"), scale
                    )
                known = [(update, bad_loss) for update, bad_loss in known if bad_loss]
                count -= overflows
            if count:
                logger.warning("%s", "\n".join(_lines(known, count)))
        self._recent.clear()


def _merged(known: list[tuple[_Update, bool]], world: World) -> list[tuple[_Update, bool]]:
    """The same updates, which all ranks have skipped, with the samples of all ranks and whether any loss was bad."""
    if world.mesh is None:
        return known
    own = [([ids.tolist() for ids in update.sample_ids], bad_loss) for update, bad_loss in known]
    gathered = world.gather_json(own if world.counts_loss else [])
    parts = [part for part in gathered if part]
    merged = []
    for place, (update, _) in enumerate(known):
        sample_ids = [np.array(ids, dtype=np.int64) for part in parts for ids in part[place][0]]
        merged.append((update._replace(sample_ids=sample_ids), any(part[place][1] for part in parts)))
    return merged


def _lines(known: Sequence[tuple[_Update, bool]], count: int) -> Iterator[str]:
    were = "was" if count == 1 else "were"
    yield f"{counted(count, 'update')} {were} skipped, loss or gradient was infinite or not a number:"
    if count > len(known):
        yield f"  {count - len(known)} of them with unknown samples (a smaller `log_interval` helps)"
    for update, bad_loss in known[:_UPDATES_SHOWN]:
        what = "loss" if bad_loss else "gradient"
        yield f"  update {update.num_updates}, epoch {update.epoch}: {what}; {name_samples(update.sample_ids)}"
    if len(known) > _UPDATES_SHOWN:
        yield f"  and {len(known) - _UPDATES_SHOWN} more, the last of them update {known[-1][0].num_updates}"


def name_samples(sample_ids: Sequence[NDArray[np.int64]]) -> str:
    """The ids of an update's samples, by micro-batch if there are several.

    Args:
        sample_ids: [B] each.
    """
    parts = []
    for number, ids in enumerate(sample_ids, start=1):
        shown = ", ".join(map(str, ids[:_IDS_SHOWN].tolist()))
        more = f" ... ({len(ids)} samples)" if len(ids) > _IDS_SHOWN else ""
        parts.append((f"micro-batch {number}: " if len(sample_ids) > 1 else "") + f"samples {shown}{more}")
    return "; ".join(parts)
