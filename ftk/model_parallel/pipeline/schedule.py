"""torch's pipeline schedules, run on micro-batches that are given one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from ftk.model_parallel.pipeline.layout import PipelineLayout
from ftk.model_parallel.pipeline.stage_module import MicroBatch, Stage

SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
"""Narayanan et al. 2021 (1F1B, interleaved), Huang et al. 2019 (GPipe), Qi et al. 2023 (zero bubble, ZB1P)."""

_OF_ONE_STAGE = ("1f1b", "gpipe")


class Schedule:
    """The order of forward and backward passes of one process, for a number and a size of micro-batches.

    torch's buffers between stages have fixed sizes, so that larger micro-batches need another schedule.

    Args:
        name: one of `SCHEDULES`.
        count: micro-batches of an update.
        hidden: [room, H] of the buffers between stages (`MicroBatch.room`).
        hidden_dtype: their type.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        layout: PipelineLayout,
        group: dist.ProcessGroup,
        device: torch.device,
        count: int,
        hidden: Sequence[int],
        hidden_dtype: torch.dtype,
    ) -> None:
        def on_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.empty(tuple(shape), dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

        self._modules = tuple(stages)
        # With examples of input and output torch needs no forward pass to find them out.
        self._stages = [
            PipelineStage(
                stage,
                stage.index,
                layout.num_stages,
                device,
                input_args=on_meta((), torch.int64) if stage.is_first else on_meta(hidden, hidden_dtype),
                output_args=on_meta((), torch.float32) if stage.is_last else on_meta(hidden, hidden_dtype),
                group=group,
            )
            for stage in stages
        ]
        self._nothing = torch.zeros((), dtype=torch.int64, device=device)
        (given,) = self._stages if name in _OF_ONE_STAGE else (self._stages,)
        # The last stage gives the loss itself.
        self._schedule = SCHEDULES[name](given, count, loss_fn=lambda loss, target: loss, scale_grads=False)

    def run(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Go forward and backward through all micro-batches; gradients are added to the parameters'.

        Raises:
            Exception: whatever a stage raised, and not torch's account of that stage's tensors.
        """
        for module in self._modules:
            module.begin(micro_batches)
        for stage in self._stages:  # as `step` of the schedule, which would cut one large batch in pieces, does
            stage.has_backward = True
            stage.clear_runtime_states()
        count = len(micro_batches)
        try:  # the first stage gets nothing, but for the micro-batches
            self._schedule._step_microbatches([(self._nothing,)] * count, None, [None] * count)
        except RuntimeError as error:
            if (cause := _cause(error)) is error:
                raise
            raise cause from None


def _cause(error: BaseException) -> BaseException:
    """What went wrong in a stage: torch raises a RuntimeError of its own that lists all tensors, from the first one."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None and "ailed to run" in str(error):
        error = error.__cause__
    return error
