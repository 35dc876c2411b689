"""Training figures: sums that stay on the device until a line is due, and the time that training takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftk.criterions.base import Criterion
from ftk.errors import UserError
from ftk.model_parallel.world import World

Sums = dict[str, tuple[Tensor, Tensor]]
"""Name -> (0-d sum, 0-d count) on the device."""

PARTS = ("data", "forward_backward", "optimizer", "wait", "log", "validation", "checkpoint")
"""What the time is split into, see docs/training.md. "wait": the host waits for the device at a log line."""


class Meters:
    """Named (sum, count) pairs on a device. Adding never waits for it; `read` does, once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._totals: dict[str, Tensor] = {}  # name -> [2] float64: sum, count

    def add(self, sums: Sums, unless: Tensor | None = None) -> None:
        """Add to each named pair, or to none of them where `unless` (0-d bool) is true.

        Args:
            sums: name -> (0-d sum, 0-d count); a pair may lie on the host, where the others are on a GPU.
            unless: on this device.
        """
        for name, (total, count) in sums.items():
            pair = torch.stack([total.detach().double(), count.detach().double()])  # [2]
            pair = pair.to(self.device, non_blocking=self.device.type != "cpu")  # to the host it would come too late
            if unless is not None:
                pair = torch.where(unless, 0.0, pair)
            self._totals[name] = self._totals[name] + pair if name in self._totals else pair

    def read(self) -> dict[str, tuple[float, float]]:
        """Name -> (sum, count) on the host."""
        if not self._totals:
            return {}
        pairs = torch.stack(list(self._totals.values())).tolist()  # the one wait
        return {name: (total, count) for name, (total, count) in zip(self._totals, pairs, strict=True)}

    def reset(self) -> None:
        self._totals = {}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        self._totals = {
            name: torch.tensor(pair, dtype=torch.float64, device=self.device) for name, pair in state.items()
        }


class Lap(NamedTuple):
    """What went by between two lines.

    Attributes:
        seconds: time of training, without what was put aside (validation, saving).
        wall_seconds: all of the time.
        parts: seconds of the wall time by name.
    """

    seconds: float
    wall_seconds: float
    parts: dict[str, float]

    def shares(self) -> dict[str, float]:
        """The wall time split: `NAME_share` for each of `PARTS`, and `other_share` for what no part counted."""
        wall = max(self.wall_seconds, 1e-9)
        shares = {f"{name}_share": self.parts.get(name, 0.0) / wall for name in PARTS}
        return shares | {"other_share": max(0.0, 1.0 - sum(shares.values()))}


class Stopwatch:
    """Time spent on a run, earlier processes included, and time between two lines without what was put aside.

    Args:
        clock: seconds from anywhere, rising.

    Attributes:
        last_lap: what `lap` has returned last.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.last_lap = Lap(0.0, 0.0, {})
        self._began = clock()
        self._lap_began = self._counted_until = clock()
        self._aside = 0.0  # seconds of this lap
        self._open: list[str] = []  # parts that we are in, the innermost last
        self._parts: dict[str, float] = {}  # seconds of this lap, by name

    def start(self, previous_seconds: float) -> None:
        """The run begins now, or goes on after `previous_seconds` of earlier processes."""
        self._began = self._clock() - previous_seconds

    def seconds(self) -> float:
        """The run's time until now."""
        return self._clock() - self._began

    def lap(self) -> Lap:
        """What went by since the last lap; begins a new one. A part that is open goes on in the new lap."""
        now = self._count()
        wall = now - self._lap_began
        self.last_lap = Lap(wall - self._aside, wall, self._parts)
        self._lap_began, self._aside, self._parts = now, 0.0, {}
        return self.last_lap

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside is counted under a name; what a part inside of it counts is not counted twice."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def parts(self) -> dict[str, float]:
        """Seconds of the present lap by name."""
        return dict(self._parts)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside (validation, saving) does not count into the lap's time of training."""
        began = self._clock()
        try:
            yield
        finally:
            self._aside += self._clock() - began

    def _count(self) -> float:
        """Give the time since the last call to the innermost open part; returns the time now."""
        now = self._clock()
        if self._open:
            self._parts[self._open[-1]] = self._parts.get(self._open[-1], 0.0) + now - self._counted_until
        self._counted_until = now
        return now


class TrainingFigures:
    """What a training record says: the device's sums since the last one, and rates by the host's counts.

    Args:
        device: where the sums are kept.
        stopwatch: of the run.
        world: the processes whose sums are added where they are read; None: this one alone.
        criterion: whose losses these are; its `nats` have perplexities.
    """

    def __init__(
        self,
        device: torch.device,
        stopwatch: Stopwatch,
        world: World | None = None,
        criterion: Criterion | None = None,
    ) -> None:
        self.stopwatch = stopwatch
        self._criterion = criterion
        self.world = world or World.single(device)
        self._meters = Meters(device)
        self._skipped = torch.zeros(2, dtype=torch.int64, device=device)  # altogether, in a row until now
        self._num_updates = self._num_tokens = 0  # of this process, since the last record
        self._num_targets: float = 0
        # Skipped updates at the last record; None once the counts of targets have been compared.
        self._skipped_before: int | None = 0

    def add(self, sums: Sums, *, skip: Tensor, num_tokens: int, num_targets: float) -> None:
        """Count one update. Waits for nothing.

        Args:
            sums: name -> (0-d sum, 0-d count), of this process's batches.
            skip: 0-d bool, whether the update was skipped; then its sums are left out.
            num_tokens: of the update, padding counted.
            num_targets: what the loss of the update is divided by.
        """
        if self.world.counts_loss:  # other processes have the same batches
            self._meters.add(sums, unless=skip)
        total, in_a_row = self._skipped.unbind()
        self._skipped = torch.stack([total + skip, (in_a_row + 1) * skip])
        self._num_updates += 1
        self._num_tokens += num_tokens
        self._num_targets += num_targets

    def record(self) -> dict[str, float]:
        """Averages and rates since the last record, of all processes; waits for the device, and begins anew.

        Averages are NaN where every update was skipped.

        Raises:
            UserError: the criterion counts other targets than it has said before (`Criterion.count`).
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
        """Once, at the first record whose updates all count: what losses were divided by against `num_targets`."""
        if self._skipped_before is None:
            return
        skipped, _ = self.skipped()
        if skipped != self._skipped_before:  # the device's sums leave out what the host has counted
            self._skipped_before = skipped
            return
        self._skipped_before = None
        _, counted = sums.get("loss", (0.0, 0.0))
        if not math.isclose(counted, self._num_targets, rel_tol=1e-4):  # sums of float32 weights differ a little
            raise UserError(
                f"criterion {type(self._criterion).__name__}: the sum of `num_targets` is {counted:g}, but `count` "
                f"says {self._num_targets:g}, by which the loss is divided; make the two agree"
            )

    def skipped(self) -> tuple[int, int]:
        """Skipped updates: altogether, and in a row until now. Waits for the device."""
        total, in_a_row = self._skipped.tolist()
        return total, in_a_row

    def state_dict(self) -> dict[str, Any]:
        """Of all processes together, on each of them."""
        meters = {name: list(pair) for name, pair in summed(self._meters.read(), self.world).items()}
        return {"meters": meters, "skipped": list(self.skipped())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.world.is_main:  # once among all
            self._meters.load_state_dict(state["meters"])
        self._skipped = torch.tensor(state["skipped"], dtype=torch.int64, device=self._skipped.device)
        if self._skipped_before is not None:
            self._skipped_before = -1  # the sums may be of updates that were not counted here: not compared


def summed(sums: Mapping[str, tuple[float, float]], world: World) -> dict[str, tuple[float, float]]:
    """Name -> (sum, count) of all processes together, on every one of them; not all need know all names."""
    if world.mesh is None:
        return dict(sums)
    totals: dict[str, tuple[float, float]] = {}
    for own in world.gather_json(sums):
        for name, (total, count) in own.items():
            old = totals.get(name, (0.0, 0.0))
            totals[name] = (old[0] + total, old[1] + count)
    return totals


def averages(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Sum over count of each pair that has a count."""
    return {name: total / count for name, (total, count) in sums.items() if count > 0}


def perplexity(loss: float) -> float:
    """exp(loss) of a loss in nats, with the loss capped at 20: beyond that no digit says anything."""
    return math.exp(min(loss, 20.0))


def with_perplexities(record: dict[str, float], nats: Collection[str]) -> dict[str, float]:
    """The record with `ppl`, and `ppl_NAME` next to each `loss_NAME`, where these losses are in nats.

    Under label smoothing (there is an `nll_loss`) perplexity is that of the likelihood without it; the groups' losses
    are smoothed, and have no perplexity.

    Args:
        record: with `loss`; `ppl`, where given, holds its place.
        nats: names of what is in nats (`Criterion.nats`).
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
