"""CUDA graphs: many kernels that are launched at once, on the same memory each time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")
Step = Callable[[], T]
Recorder = Callable[[Step[T]], Step[T]]
"""Makes of a step what repeats its kernels on the same memory. It neither takes the step nor asks the device anything;
what the step returns lies in the same place after each repetition."""


class CudaGraphs:
    """Records steps as CUDA graphs, which have one pool of memory, as only one of them is replayed at a time.

    `torch.cuda.graph` leaves its thread on another stream where a step cannot be recorded.

    Args:
        device: of the steps, which need not be the present one.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def __call__(self, step: Step[T]) -> Step[T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            # Other threads, such as those of ftk-serve, may go on with what they do on the device.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                returned = step()
                graph.capture_end()
            except BaseException:
                with suppress(RuntimeError):  # of a capture that the step has spoilt, or that has just failed to end
                    graph.capture_end()
                self._recover()
                raise

        def replay() -> T:
            graph.replay()
            return returned

        return replay

    def _recover(self) -> None:
        """After a capture that failed: new memory comes from the common pool, and random numbers can be drawn."""
        with suppress(RuntimeError):  # where that capture has still ended the use of the pool
            torch._C._cuda_endAllocateToPool(self.stream.device_index, self.pool)
        # torch ends a generator's part in a capture only with one that succeeds.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=self.stream.device)
        graph.capture_end()
