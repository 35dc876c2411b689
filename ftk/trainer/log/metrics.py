"""Training figures: sums that stay on the device until a record is written, and times."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftk.criterions.base import Criterion
from ftk.errors import UserError
from ftk.model_parallel.step_module import add_sums
from ftk.model_parallel.world import World

logger = logging.getLogger(__name__)

Sums = dict[str, tuple[Tensor, Tensor]]
"""Name -> (0-d sum, 0-d count) on the device."""

PARTS = ("data", "forward_backward", "optimizer", "wait", "log", "validation", "checkpoint")
"""Parts of the training time, see docs/training.md. "wait": the host waits for the device at a record."""


class Meters:
    """Named (sum, count) pairs on a device. `read` waits for it once, `add` never."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._totals: dict[str, Tensor] = {}  # name -> [2] float64: sum, count

    def add(self, sums: Sums, unless: Tensor | None = None) -> None:
        """Add to each named pair.

        Args:
            sums: name -> (0-d sum, 0-d count); on the device or the host.
            unless: 0-d bool on the device; where it is true, nothing is added.
        """
        for name, (total, count) in sums.items():
            pair = torch.stack([total.detach().double(), count.detach().double()])  # [2]
            pair = pair.to(self.device, non_blocking=self.device.type != "cpu")  # the host would read it too early
            if unless is not None:
                pair = torch.where(unless, 0.0, pair)
            self._totals[name] = self._totals[name] + pair if name in self._totals else pair

    def read(self) -> dict[str, tuple[float, float]]:
        """Name -> (sum, count) on the host."""
        if not self._totals:
            return {}
        pairs = torch.stack(list(self._totals.values())).tolist()  # waits
        return {name: (total, count) for name, (total, count) in zip(self._totals, pairs, strict=True)}

    def reset(self) -> None:
        self._totals = {}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        self._totals = {
            name: torch.tensor(pair, dtype=torch.float64, device=self.device) for name, pair in state.items()
        }


class Lap(NamedTuple):
    """The time between two training records.

    Attributes:
        seconds: training time, without validation and saving.
        wall_seconds: total time.
        parts: seconds of the wall time by name of the part.
    """

    seconds: float
    wall_seconds: float
    parts: dict[str, float]

    def shares(self) -> dict[str, float]:
        """Shares of the wall time: `NAME_share` for each of `PARTS`, and `other_share` for the rest."""
        wall = max(self.wall_seconds, 1e-9)
        shares = {f"{name}_share": self.parts.get(name, 0.0) / wall for name in PARTS}
        return shares | {"other_share": max(0.0, 1.0 - sum(shares.values()))}


class Stopwatch:
    """Measures the time of a run, earlier processes included, and the time between two training records.

    Args:
        clock: monotonic, in seconds.

    Attributes:
        last_lap: the last result of `lap`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.last_lap = Lap(0.0, 0.0, {})
        self._began = clock()
        self._lap_began = self._counted_until = clock()
        self._aside = 0.0  # seconds of this lap
        self._open: list[str] = []  # open parts, the innermost last
        self._parts: dict[str, float] = {}  # seconds of this lap, by name

    def start(self, previous_seconds: float) -> None:
        """Start to measure the run, after `previous_seconds` of earlier processes."""
        self._began = self._clock() - previous_seconds

    def seconds(self) -> float:
        """The time of the run so far."""
        return self._clock() - self._began

    def lap(self) -> Lap:
        """The time since the last lap. Starts a new one, in which open parts stay open."""
        now = self._count()
        wall = now - self._lap_began
        self.last_lap = Lap(wall - self._aside, wall, self._parts)
        self._lap_began, self._aside, self._parts = now, 0.0, {}
        return self.last_lap

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block under a name, without the time of parts inside it."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do not count the time of the block (validation, saving) as training time."""
        began = self._clock()
        try:
            yield
        finally:
            self._aside += self._clock() - began

    def _count(self) -> float:
        """Add the time since the last call to the innermost open part; returns the current time."""
        now = self._clock()
        if self._open:
            self._parts[self._open[-1]] = self._parts.get(self._open[-1], 0.0) + now - self._counted_until
        self._counted_until = now
        return now


class TrainingFigures:
    """The figures of a training record: sums on the device since the last one, and rates from counts on the host.

    Args:
        world: the ranks whose sums are added when they are read.
        criterion: of the losses; its `nats` have perplexities.
    """

    def __init__(self, world: World, stopwatch: Stopwatch, criterion: Criterion | None = None) -> None:
        self.stopwatch = stopwatch
        self._criterion = criterion
        self.world = world
        self._meters = Meters(world.device)
        self._skipped = torch.zeros(2, dtype=torch.int64, device=world.device)  # in total, in a row
        self._num_updates = self._num_tokens = 0  # of this rank, since the last record
        self._num_targets: float = 0
        # Skipped updates at the last record; None once the counts of targets have been compared.
        self._skipped_before: int | None = 0

    def add(self, sums: Sums, *, skip: Tensor, num_tokens: int, num_targets: float) -> None:
        """Count one update, without waiting for the device.

        Args:
            sums: name -> (0-d sum, 0-d count), of this rank's batches.
            skip: 0-d bool, whether the update was skipped; then its sums are left out.
            num_tokens: of the update, padding counted.
            num_targets: divisor of the update's loss.
        """
        if self.world.counts_loss:  # other ranks have the same batches
            self._meters.add(sums, unless=skip)
        total, in_a_row = self._skipped.unbind()
        self._skipped = torch.stack([total + skip, (in_a_row + 1) * skip])
        self._num_updates += 1
        self._num_tokens += num_tokens
        self._num_targets += num_targets

    def record(self) -> dict[str, float]:
        """Averages and rates since the last record, of all ranks; waits for the device, and resets the sums.

        Averages are NaN if every update was skipped.

        Raises:
            UserError: the criterion's `num_targets` differ from its `count`.
        """
        with self.stopwatch.part("wait"):
            sums = summed(self._meters.read(), self.world)
            self._compare_counts(sums)
        lap = self.stopwatch.lap()
        seconds = max(lap.seconds, 1e-9)
        losses = averages(sums)
        head = {"loss": losses.pop("loss", math.nan), "ppl": math.nan, "gnorm": losses.pop("gnorm", math.nan)}
        record = with_perplexities({**head, **losses}, (self._criterion or Criterion).nats)
        record["tokens_per_second"] = self._num_tokens / seconds
        record["target_tokens_per_second"] = self._num_targets / seconds
        record["updates_per_second"] = self._num_updates / seconds
        record |= lap.shares()
        self._meters.reset()
        self._num_updates = self._num_tokens = self._num_targets = 0
        return record

    def _compare_counts(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Compare the divisors of losses with `num_targets`, once: at the first record without skipped updates.

        If both are 0, a warning says it.
        """
        if self._skipped_before is None:
            return
        skipped, _ = self.skipped()
        if skipped != self._skipped_before:  # the host has counted skipped updates, the device has not
            self._skipped_before = skipped
            return
        self._skipped_before = None
        _, counted = sums.get("loss", (0.0, 0.0))
        if not math.isclose(counted, self._num_targets, rel_tol=1e-4):  # sums of float32 weights differ a little
            raise UserError(
                f"criterion {type(self._criterion).__name__}: the sum of 'num_targets' is {counted:g}, but 'count' "
                f"says {self._num_targets:g}, by which the loss is divided; make the two agree"
            )
        if not self._num_targets:
            logger.warning("no sample had a target token so far, so nothing is learned; see samples with ftk-data show")

    def skipped(self) -> tuple[int, int]:
        """The number of skipped updates: in total, and in a row at the end. Waits for the device."""
        total, in_a_row = self._skipped.tolist()
        return total, in_a_row

    def state_dict(self) -> dict[str, Any]:
        """Summed over all ranks, the same on each."""
        meters = {name: list(pair) for name, pair in summed(self._meters.read(), self.world).items()}
        return {"meters": meters, "skipped": list(self.skipped())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.world.is_main:  # once among all
            self._meters.load_state_dict(state["meters"])
        self._skipped = torch.tensor(state["skipped"], dtype=torch.int64, device=self._skipped.device)
        if self._skipped_before is not None:
            self._skipped_before = -1  # the sums may include updates that this process did not count: not compared


def summed(sums: Mapping[str, tuple[float, float]], world: World) -> dict[str, tuple[float, float]]:
    """Name -> (sum, count), summed over all ranks, the same on each; names may differ between ranks."""
    if world.mesh is None:
        return dict(sums)
    totals: dict[str, tuple[float, float]] = {}
    for own in world.gather_json(sums):
        add_sums(totals, own)
    return totals


def averages(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Name -> sum / count, for counts above 0."""
    return {name: total / count for name, (total, count) in sums.items() if count > 0}


def perplexity(loss: float) -> float:
    """exp(loss) of a loss in nats, with the loss capped at 20."""
    return math.exp(min(loss, 20.0))


GREATEST_PERPLEXITY = perplexity(math.inf)
"""Greater ones are recorded as this one, as Megatron-LM does."""


def with_perplexities(record: dict[str, float], nats: Collection[str]) -> dict[str, float]:
    """The record with `ppl`, and `ppl_NAME` after each `loss_NAME`, for losses in nats.

    With label smoothing (there is an `nll_loss`), `ppl` is exp(nll_loss); the losses of groups are smoothed and have no
    perplexity.

    Args:
        record: with `loss`; if it has `ppl`, the value is replaced.
        nats: names of the figures in nats (`Criterion.nats`).
    """
    likelihood = "nll_loss" if "nll_loss" in record else "loss"
    made = {}
    for name, value in record.items():
        made[name] = value
        if name.startswith("loss_") and likelihood == "loss" and "loss" in nats:
            made[f"ppl_{name.removeprefix('loss_')}"] = perplexity(value)
    if likelihood in nats:
        made["ppl"] = perplexity(record[likelihood])
    else:
        made.pop("ppl", None)
    return made
