"""Steps of a decoder whose shapes repeat: each is recorded once, as a CUDA graph, and replayed.

A step of a small model is some 400 kernels of a few microseconds each; launching them takes the host several times as
long. A graph launches them at once. It takes numbers of rows and of slots from a few sizes, and reads and writes the
same memory in each replay (as gpt-fast and vLLM do).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable

import torch
import torch.distributed as dist
from torch import Tensor

from ftk.modules.cuda_graphs import CudaGraphs, Recorder, Step

logger = logging.getLogger(__name__)

LEAST_SLOTS = 128

STEPS_BEFORE = 3
"""Steps of a number of rows that are taken as they are: fewer would not make up for recording one."""

MOST_GRAPHS = 64
"""Sizes that are kept, those used last; each takes memory."""


def num_slots(length: int) -> int:
    """The size for a number of slots: a multiple of 128, and of a quarter of the power of two below it.

    Fewer sizes are worth some masked slots: recording one takes as long as dozens of replayed steps.
    """
    size = max(LEAST_SLOTS, 1 << max(length - 1, 0).bit_length() >> 3)
    return -(-length // size) * size


def num_rows(count: int) -> int:
    """The size for a number of rows: 1, 2, 4 or a multiple of 8."""
    return -(-count // 8) * 8 if count > 4 else 1 << (count - 1).bit_length()


class RecordedSteps:
    """The steps of one decoder.

    The first steps of a number of rows are taken as they are, which loads kernels and makes what is made on first use;
    from then on a size is recorded at its first step, or at its second once half of `MOST_GRAPHS` are. Where recording
    fails, all steps are taken as they are.

    Args:
        record: see `Recorder`.
        max_slots: of a row; a multiple of 8.
        width: W.
    """

    def __init__(self, record: Recorder, max_rows: int, max_slots: int, width: int, device: torch.device) -> None:
        self.max_rows, self.max_slots = max_rows, max_slots
        self.tokens = torch.zeros(max_rows, width, dtype=torch.int64, device=device)
        self._record: Recorder | None = record
        self._seen: Counter[Hashable] = Counter()  # numbers of rows, and of these sizes
        self._replays: dict[Hashable, Step] = {}

    def rows(self, count: int) -> int:
        """R, at least `count`."""
        return min(num_rows(count), self.max_rows)

    def slots(self, length: int) -> int:
        """S, at least `length`."""
        return min(num_slots(length), self.max_slots)

    def take(self, rows: int, size: Hashable, step: Step) -> Tensor:
        """Takes a step.

        Args:
            rows: R, on which it depends which kernels the step takes.
            size: all other numbers on which it depends what they do.
            step: takes it, on tensors that are the same for each step of this size.

        Returns:
            what it returns, in memory of its own.
        """
        own = (rows, size)
        replay = self._replays.pop(own, None)
        # While there is room each size is recorded at once, later those that come again.
        may = self._seen[rows] >= STEPS_BEFORE and (len(self._replays) < MOST_GRAPHS // 2 or self._seen[own] > 0)
        if replay is None and may and self._record is not None:
            if len(self._replays) == MOST_GRAPHS:
                del self._replays[next(iter(self._replays))]  # the one used longest ago
            try:
                replay = self._record(step)
            except Exception as error:  # of a layer that asks the device, or of memory: steps are still right without
                logger.warning(
                    "a step cannot be recorded as a CUDA graph, so its kernels are launched one by one: %s",
                    str(error).partition("\n")[0],
                )
                self._record = None
        self._seen[rows] += 1
        self._seen[own] += 1
        if replay is None:
            return step()
        self._replays[own] = replay
        # The next replay, of any size, overwrites what this one returns.
        return replay().clone()


def recorder_for(device: torch.device) -> Recorder[Tensor] | None:
    """What records steps on a device; None where they are taken as they are.

    That is on a CPU, and where there are several processes: messages between them are not recorded.
    """
    shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return CudaGraphs(device) if device.type == "cuda" and not shared else None
