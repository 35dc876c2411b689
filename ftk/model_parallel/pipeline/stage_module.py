"""One stage of a pipeline as the module that is called; on the last stage with the loss in it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ftk.errors import UserError
from ftk.model_parallel.gradients import guarded
from ftk.model_parallel.pipeline.batches import Shape
from ftk.model_parallel.step_module import StepModule


@dataclass(eq=False)
class MicroBatch:
    """One micro-batch on its way through the stages of a process.

    Attributes:
        batch: on the device.
        training: whether this is a step of training or one of validation.
        scale: what the loss is multiplied by before it goes backward, 0-d.
        shape: B and T of the hidden states between stages, where T may be a share of the tokens.
        room: tokens that a buffer between stages holds, B T or more.
        arguments: what the criterion calls `hidden_states` with, by name (`Stage.arguments`).
        outputs: where the last stage puts its `LossOutput`, detached.
    """

    batch: dict[str, Any]
    training: bool
    scale: Tensor
    shape: Shape
    room: int
    arguments: dict[str, Any] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)


class Stage(StepModule):
    """A stage: embedding and layers, or layers, or layers, output layer and loss. The root of FSDP2, if that is used.

    The criterion is run on every stage, with a stand-in for the model. Up to where it asks for hidden states it says
    what the batch is for the model (`arguments`); only on the last stage it goes on, with the hidden states that came
    through. So any criterion will do that asks for them once, and needs to know nothing of stages.

    Args:
        model: the stage's own part (`ftk.model_parallel.pipeline.stages.Part.stages`).
        task: takes the step (`ftk.tasks.Task`).
        criterion: what the task computes the loss with.
        index: of the stage.
        num_stages: of the pipeline, 2 or more.
        precision: fp32, bf16 or fp16, of matrix products.
        hidden_dtype: in which hidden states are handed on.
        loss_apart: go backward through the loss at once, and from its input later, as zero-bubble needs it: there a
            backward pass is run in two parts, which a loss that makes its gradients in the forward cannot.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Any,
        criterion: Any,
        index: int,
        num_stages: int,
        *,
        precision: str = "fp32",
        hidden_dtype: torch.dtype = torch.float32,
        loss_apart: bool = False,
    ) -> None:
        super().__init__(model, task, criterion)
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
        """What is handed on of the next micro-batch (`begin`).

        Args:
            received: hidden states of the stage before, [room, H], of which B T are meant; anything on the first stage.

        Returns:
            Hidden states [room, H]; of the last stage the loss, scaled, 0-d, from which one can go backward.
        """
        micro_batch = next(self._coming)
        if self.is_last:
            return self._loss(_unpacked(received, micro_batch), micro_batch)
        with self._autocast(received.device):
            arguments, embed = micro_batch.arguments, self.model.embed
            if self.is_first:
                hidden = embed(**_taken_by(embed, arguments))  # type: ignore[operator]
            else:
                hidden = _unpacked(received, micro_batch)
            hidden = _through_layers(self.model, hidden, arguments).to(self._hidden_dtype)
        if torch.is_grad_enabled() and not hidden.requires_grad:  # all frozen until here: an end for the backward pass
            hidden = hidden.detach().requires_grad_()
        return _packed(hidden, micro_batch.room)

    def arguments(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """What the criterion calls `hidden_states` with.

        Asked before the first message of an update, so that data which the criterion refuses is refused everywhere.

        Raises:
            UserError: a pipeline cannot serve this criterion.
        """
        try:
            self._step(_Asked(self.model), micro_batch)
        except _HiddenStatesWanted as wanted:
            return wanted.arguments
        raise UserError("the criterion does not ask the model for hidden states; a pipeline cannot train with it")

    def _loss(self, received: Tensor, micro_batch: MicroBatch) -> Tensor:
        apart = self._loss_apart and torch.is_grad_enabled()
        with self._autocast(received.device):
            stand_in = _LastStage(self.model, received, apart)
            output = self._step(stand_in, micro_batch)
        micro_batch.outputs.append(output._replace(loss=output.loss.detach()))
        loss = guarded(output.loss, micro_batch.scale)
        if not apart:
            return loss
        loss.backward()
        return stand_in.surrogate()

    def _step(self, model: StandIn, micro_batch: MicroBatch) -> Any:
        step = self._task.train_step if micro_batch.training else self._task.valid_step
        return step(model, self._criterion, micro_batch.batch)

    def _autocast(self, device: torch.device) -> torch.autocast:
        dtype = torch.float16 if self._precision == "fp16" else torch.bfloat16
        return torch.autocast(device.type, dtype=dtype, enabled=self._precision != "fp32")


class StandIn(ABC):
    """What a criterion is given in a model's place; it has all that this stage's part of the model has."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        return self.head(self.hidden_states(*arguments, **keywords))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @abstractmethod
    def hidden_states(self, *arguments: Any, **keywords: Any) -> Tensor:
        """As the model's."""


class _HiddenStatesWanted(BaseException):
    """Ends a criterion where it asks for hidden states. No `Exception`, so that no criterion holds it up."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


class _Asked(StandIn):
    """Ends the criterion."""

    def hidden_states(self, *arguments: Any, **keywords: Any) -> Tensor:
        raise _HiddenStatesWanted(_by_name(self._model, arguments, keywords))


class _LastStage(StandIn):
    """Gives the criterion what came through the pipeline."""

    def __init__(self, model: Any, received: Tensor, apart: bool) -> None:
        super().__init__(model)
        self._received: Tensor | None = received
        self._apart = apart
        self._hidden: Tensor | None = None
        self._given: Tensor | None = None

    def hidden_states(self, *arguments: Any, **keywords: Any) -> Tensor:
        if self._received is None:
            raise UserError("the criterion asks for hidden states twice in a step; a pipeline gives them once")
        received, self._received = self._received, None
        hidden = _through_layers(self._model, received, _by_name(self._model, arguments, keywords))
        hidden = self._model.finish(hidden)
        if self._apart:
            self._hidden, hidden = hidden, hidden.detach().requires_grad_()
            self._given = hidden
        return hidden

    def surrogate(self) -> Tensor:
        """A number from which the backward pass gives the hidden states the gradient that they have of the loss."""
        assert self._hidden is not None
        assert self._given is not None
        gradient = self._given.grad
        return (self._hidden * (torch.zeros_like(self._given) if gradient is None else gradient)).sum()


def _through_layers(model: Any, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
    attend = model.attend(**_taken_by(model.attend, arguments))
    for layer in model.layers:
        hidden = layer(hidden, attend)
    return hidden


def _packed(hidden: Tensor, room: int) -> Tensor:
    """[B, T, H] -> [room, H], so that micro-batches of all shapes go through buffers of one."""
    # A copy also where there is nothing to add: zero-bubble detaches in place what is handed on, and no view lets it.
    return F.pad(hidden.flatten(0, 1), (0, 0, 0, room - hidden.size(0) * hidden.size(1)))


def _unpacked(received: Tensor, micro_batch: MicroBatch) -> Tensor:
    """[room, H] -> [B, T, H]"""
    rows, tokens = micro_batch.shape
    return received[: rows * tokens].unflatten(0, (rows, tokens))


def _by_name(model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `hidden_states`, checked to be for `embed` or `attend`."""
    named = dict(zip(("tokens",), arguments, strict=False)) | keywords
    known = inspect.signature(model.embed).parameters.keys() | inspect.signature(model.attend).parameters.keys()
    if unknown := named.keys() - known:
        raise UserError(
            f"{type(model).__name__}.hidden_states takes {', '.join(sorted(unknown))}, which neither its embed nor its "
            f"attend takes; a pipeline calls only these"
        )
    return named


def _taken_by(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}
