"""One stage of a pipeline as the module that is called; on the last stage with the loss in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ftk.batch import Batch
from ftk.errors import UserError
from ftk.model_parallel.gradients import guarded
from ftk.model_parallel.step_module import StepModule, autocast


class Shape(NamedTuple):
    """Rows and tokens, padding counted."""

    rows: int
    tokens: int


@dataclass(eq=False)
class MicroBatch:
    """One micro-batch on its way through the stages of a process.

    Attributes:
        batch: on the device.
        scale: what the loss is multiplied by before it goes backward, 0-d.
        shapes: B and T of the hidden states between stages, where T may be a share of the tokens; of two stacks those
            of the source and of the decoder's tokens.
        room: tokens that a buffer between stages holds, the sum of B T or more.
        outputs: where the last stage puts its `LossOutput`, detached.
    """

    batch: Batch
    scale: Tensor
    shapes: tuple[Shape, ...]
    room: int
    outputs: list[Any] = field(default_factory=list)


class Stage(StepModule):
    """A stage: embedding and layers, or layers, or layers, output layer and loss. The root of FSDP2, if that is used.

    Each stage has the whole batch, of which it takes what its part of the model reads; the last one gives the criterion
    the hidden states that came through.

    Args:
        model: the stage's own part (`ftk.model_parallel.pipeline.stages.Part.stages`).
        criterion: computes the loss (`ftk.criterions.base.Criterion`), in one pass.
        num_stages: of the pipeline, 2 or more.
        precision: fp32, bf16 or fp16, of matrix products.
        hidden_dtype: of hidden states between stages.
        loss_apart: go backward through the loss at once, and from its input later, as zero-bubble needs it: there a
            backward pass is run in two parts, which a loss that makes its gradients in the forward cannot.

    Raises:
        UserError: the criterion takes the model through more than one pass.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Any,
        index: int,
        num_stages: int,
        *,
        precision: str = "fp32",
        hidden_dtype: torch.dtype = torch.float32,
        loss_apart: bool = False,
    ) -> None:
        super().__init__(model, criterion)
        if not criterion.is_single_pass():
            raise UserError(
                f"{type(criterion).__name__} takes the model through more than one pass, and a pipeline takes a batch "
                f"through once; choose another `criterion`, or `pipeline_parallel_size` 1"
            )
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self._precision = precision
        self._hidden_dtype = hidden_dtype
        self._loss_apart = loss_apart
        self._coming: Iterator[MicroBatch] = iter(())

    def begin(self, micro_batches: Iterable[MicroBatch]) -> None:
        """What the next forward passes are for, one after the other.

        Not an argument of `forward`: torch's schedules look for gradients in the arguments of a stage, and before 2.13
        in all of them.
        """
        self._coming = iter(micro_batches)

    def forward(self, received: Tensor) -> Tensor:  # type: ignore[override]
        """The output of the next micro-batch (`begin`).

        Args:
            received: hidden states of the stage before, [room, H], of which those of `MicroBatch.shapes` are meant;
                anything on the first stage.

        Returns:
            Hidden states [room, H]; of the last stage the loss, scaled, 0-d, from which one can go backward.
        """
        micro_batch = next(self._coming)
        model: Any = self.model
        inputs = dict(micro_batch.batch.inputs)
        tokens = inputs.pop("tokens")  # [B, T]
        with autocast(received.device, self._precision):
            states = model.enter(tokens, inputs) if self.is_first else _unpacked(received, micro_batch)
            states = model.run_stage(states, tokens, inputs)
            if self.is_last:
                hidden = model.finish(states[-1])  # [B, T, H]
        if self.is_last:
            return self._loss(hidden, micro_batch)
        packed = _packed(states, micro_batch.room, self._hidden_dtype)
        if torch.is_grad_enabled() and not packed.requires_grad:  # all frozen so far: the backward pass needs an end
            packed = packed.detach().requires_grad_()
        return packed

    def _loss(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        """hidden [B, T, H] of the last stage -> the scaled loss, 0-d, from which one can go backward."""
        batch = micro_batch.batch
        hidden = hidden.flatten(0, 1).index_select(0, batch.places)  # [N, H]
        apart = self._loss_apart and torch.is_grad_enabled()
        given = hidden.detach().requires_grad_() if apart else hidden
        with autocast(hidden.device, self._precision):
            output = self._criterion.loss(self.model.head, given, batch)
        micro_batch.outputs.append(output._replace(loss=output.loss.detach()))
        loss = guarded(output.loss, micro_batch.scale)
        if not apart:
            return loss
        loss.backward()
        assert given.grad is not None
        # Its backward pass gives the hidden states the gradient that they have of the loss.
        return (hidden * given.grad).sum()


def _packed(states: tuple[Tensor, ...], room: int, dtype: torch.dtype) -> Tensor:
    """[B, T, H] each -> [room, H], so that micro-batches of all shapes go through buffers of one."""
    rows = [state.flatten(0, 1).to(dtype) for state in states]
    rest = room - sum(map(len, rows))
    # A copy also where there is nothing to add: zero-bubble detaches the output in place, which a view does not allow.
    return torch.cat([*rows, rows[0].new_zeros(rest, rows[0].size(1))])


def _unpacked(received: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
    """[room, H] -> [B, T, H] each"""
    sizes = [rows * tokens for rows, tokens in micro_batch.shapes]
    parts = received[: sum(sizes)].split(sizes)
    return tuple(part.unflatten(0, shape) for part, shape in zip(parts, micro_batch.shapes, strict=True))
