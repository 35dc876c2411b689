"""Takes updates and validation steps of a model that is spread over the stages of a pipeline."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ftk.batch import Batch
from ftk.model_parallel.pipeline.schedule import Schedule
from ftk.model_parallel.pipeline.stage_module import MicroBatch, Shape, Stage
from ftk.model_parallel.pipeline.stages import Part
from ftk.model_parallel.step_module import add_sums

_MAX_CACHED_SCHEDULES = 2
"""Each holds buffers for all micro-batches' hidden states; making a new one is cheap."""

_SENDS_AHEAD = 2
"""Results of validation that a stage may have in flight to the next stage before it waits."""


class PipelineRunner:
    """The steps of one process of a pipeline.

    All processes of a pipeline are given the same batches; the loss is computed on the last stage alone.

    Args:
        part: what this process holds.
        stages: the same as modules to be called, one for each of `part.stages`.
        schedule: see `ftk.model_parallel.pipeline.schedule.SCHEDULES`.
        num_micro_batches: of an update.
        token_shards: number of ranks that share each sequence between the stages (sequence parallel).
        hidden_dtype: of hidden states between stages.
        finishers: called after the last backward pass of an update, to make gradients whole.
    """

    def __init__(
        self,
        part: Part,
        stages: Sequence[Stage],
        *,
        schedule: str,
        num_micro_batches: int,
        group: dist.ProcessGroup,
        device: torch.device,
        token_shards: int = 1,
        hidden_dtype: torch.dtype = torch.float32,
        finishers: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.part = part
        self.uncounted = part.copies
        self._finishers = finishers
        self.stages = tuple(stages)
        self.num_micro_batches = num_micro_batches
        self._schedule_name = schedule
        self._group = group
        self._device = device
        self._token_shards = token_shards
        self._axes: Mapping[str, str] = part.model.INPUTS  # type: ignore[assignment]
        self._hidden_dtype = hidden_dtype
        self._schedules: OrderedDict[int, Schedule] = OrderedDict()
        self._sends: deque[tuple[Any, Tensor]] = deque()

    def forward_backward(
        self, micro_batches: Sequence[Batch], backward_scale: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Add the gradients of the micro-batches' losses, each times `backward_scale`, to the parameters'.

        They may differ in shape: what is sent between stages is as large as the largest, what is computed is not. Where
        there are fewer than `num_micro_batches`, the first one runs again with weight 0, so that every update does the
        same.

        Args:
            micro_batches: on the CPU, one or more.
            backward_scale: 0-d, on the device.

        Returns:
            "loss" and the criterion's meters: name -> (0-d sum, 0-d count), summed over the micro-batches; nothing on
            processes without the last stage.
        """
        self._finish_sends()
        batches = [batch.longer(self._token_shards, self._axes) for batch in micro_batches]
        shapes = [_shapes_between(batch, self._token_shards) for batch in batches]
        room = max(map(_num_buffer_tokens, shapes))
        moved = [batch.to(self._device) for batch in batches]
        work = [MicroBatch(batch, backward_scale, own, room) for batch, own in zip(moved, shapes, strict=True)]
        no_weight = torch.zeros_like(backward_scale)
        missing = self.num_micro_batches - len(work)
        fill = [MicroBatch(moved[0], no_weight, shapes[0], room) for _ in range(missing)]
        self._prepare(batches)
        self._schedule(room).run([*work, *fill])
        for finish in self._finishers:
            finish()
        sums: dict[str, tuple[Tensor, Tensor]] = {}
        for output in [output for micro_batch in work for output in micro_batch.outputs]:
            add_sums(sums, {"loss": (output.loss, output.num_targets), **output.meters})
        return sums

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Any:
        """The `LossOutput` of a batch, in the mode that the model is in; None on processes without the last stage.

        Sends are not waited for, so that in a loop over many batches the stages work at the same time.

        Args:
            batch: on the CPU.
        """
        shapes = _shapes_between(batch)  # whole: sequences are shared between stages in training only
        scale = torch.ones((), device=self._device)
        micro_batch = MicroBatch(batch.to(self._device), scale, shapes, room := _num_buffer_tokens(shapes))
        self._prepare([batch])
        for stage in self.stages:
            received = scale if stage.is_first else self._receive(stage.index - 1, room)
            stage.begin([micro_batch])
            output = stage(received)
            if not stage.is_last:
                self._send(stage.index + 1, output)
        return micro_batch.outputs[0] if micro_batch.outputs else None

    def _prepare(self, batches: Sequence[Batch]) -> None:
        """Before the first message, so that a batch with inputs that the model does not take is refused everywhere."""
        model: Any = self.part.model
        for batch in batches:
            model.split_inputs(batch.inputs)
        for stage in self.stages:
            stage.train(self.part.model.training)  # frames of stages are not in the model's tree

    # -- hidden states, from stage to stage ------------------------------------------------------------------

    def _receive(self, stage: int, room: int) -> Tensor:
        hidden = torch.empty(room, self.part.hidden_size, dtype=self._hidden_dtype, device=self._device)
        dist.recv(hidden, self._global_rank(stage), group=self._group)
        return hidden

    def _send(self, stage: int, hidden: Tensor) -> None:
        hidden = hidden.contiguous()
        # The tensor is kept with the work: gloo reads it until that is done.
        self._sends.append((dist.isend(hidden, self._global_rank(stage), group=self._group), hidden))
        while len(self._sends) > _SENDS_AHEAD:
            self._sends.popleft()[0].wait()

    def _finish_sends(self) -> None:
        while self._sends:
            self._sends.popleft()[0].wait()

    def _global_rank(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self.part.layout.rank_of(stage))

    # -- updates ---------------------------------------------------------------------------------------------

    def _schedule(self, room: int) -> Schedule:
        """The schedule for buffers of `room` tokens; those used last are kept."""
        schedule = self._schedules.pop(room, None)
        if schedule is None:
            while len(self._schedules) >= _MAX_CACHED_SCHEDULES:
                self._schedules.popitem(last=False)
            schedule = Schedule(
                self._schedule_name,
                self.stages,
                self.part.layout,
                self._group,
                self._device,
                self.num_micro_batches,
                (room, self.part.hidden_size),
                self._hidden_dtype,
            )
        self._schedules[room] = schedule
        return schedule


def _shapes_between(batch: Batch, token_shards: int = 1) -> tuple[Shape, ...]:
    """Of the hidden states between stages."""
    return tuple(Shape(rows, tokens // token_shards) for rows, tokens in (sample.shape for sample in batch.read_tokens))


def _num_buffer_tokens(shapes: tuple[Shape, ...]) -> int:
    return sum(rows * tokens for rows, tokens in shapes)
