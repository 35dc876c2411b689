"""Knowledge distillation: a task's own loss plus the distance to a trained model's probabilities and, optionally,
to its hidden states."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ftk.config.options import option
from ftk.criterions.base import Criterion, LossOutput, trunk_and_head
from ftk.errors import UserError
from ftk.registry import named

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ftk.batch import Batch
    from ftk.modules.heads import Head


@dataclass(kw_only=True)
class DistillationConfig:
    teacher: str | None = option(
        None,
        "a trained model with the same tokenizer, whose probabilities are learned, too: checkpoint, run or "
        "Hugging Face folder",
        metavar="PATH",
    )
    teacher_weight: float = option(
        0.5,
        "weight of the teacher's probabilities in the loss; the targets have the rest",
        "(0, 1]",
        needs={"teacher": True},
    )
    teacher_temperature: float = option(
        2.0,
        "logits of both models are divided by this before they are compared: the higher, the more small "
        "probabilities count",
        "(0, inf)",
        needs={"teacher": True},
    )
    teacher_hidden_weight: float = option(
        0.0,
        "weight of the distance between hidden states of both models, which is added to the loss",
        "[0, inf)",
        needs={"teacher": True},
    )
    teacher_hidden_loss: Literal["mse", "cosine"] = option(
        "mse",
        "distance of hidden states: the mean squared difference, or 1 - cosine",
        needs={"teacher_hidden_weight": True},
    )
    teacher_layers: list[str] = option(
        [],
        "layers whose outputs are compared, counted from 0: OWN=TEACHER, as 0=1 1=3. Default: all layers "
        "of the smaller model, with those of the other at even distances, the last with the last",
        needs={"teacher_hidden_weight": True},
        metavar="OWN=TEACHER",
    )

    def validate(self) -> Iterator[str]:
        if self.teacher == "":
            yield "teacher is empty; it must name a folder"
        for text in self.teacher_layers:
            if re.fullmatch("[0-9]{1,4}=[0-9]{1,4}", text) is None:
                yield f"teacher_layers has {text!r}; it must be two numbers of layers, as 0=1"

    def layer_pairs(self, num_student: int, num_teacher: int) -> list[tuple[int, int]]:
        """Which layers are compared: (of the model that is trained, of the teacher), counted from 0.

        Args:
            num_student: layers of the model that is trained.
            num_teacher: layers of the teacher.

        Raises:
            UserError: a model has no such layer.
        """
        count = min(num_student, num_teacher)
        even = [((part + 1) * num_student // count - 1, (part + 1) * num_teacher // count - 1) for part in range(count)]
        texts = (text.split("=") for text in self.teacher_layers)
        chosen = [(int(student), int(teacher)) for student, teacher in texts]
        for pair in chosen:
            for who, number, size in zip(("model", "teacher"), pair, (num_student, num_teacher), strict=True):
                if number >= size:
                    raise UserError(
                        f"`teacher_layers` {pair[0]}={pair[1]}: the {who} has layers 0 to {size - 1}, no layer {number}"
                    )
        return chosen or even


class Distillation(Criterion):
    """(1 - w) times a task's own loss and w T² times KL(teacher || student) at the temperature T, summed over the
    targets (Hinton et al. 2015, section 2). T² keeps the size of the gradients.

    Models pad one vocabulary as they like: only rows of tokens are compared.

    With a `teacher_hidden_weight`, it is added that many times the distance of the outputs of layers at the targets, a
    mean over the pairs of layers (Romero et al. 2015). Where the widths differ, the teacher's outputs go through a
    fixed random projection, which keeps lengths and angles (Johnson and Lindenstrauss 1984): nothing of it is learned,
    saved or restored.

    Args:
        config: weight w and temperature T.
        task: the task's criterion, which counts the targets.
        teacher: reads the inputs of the model that is trained; frozen, in evaluation mode, whole on this process. It is
            no part of the module that computes the loss, so that it is neither sharded nor saved.
        seed: of the projections.
        num_tokens: rows of the output layers that are compared, the first; None: those that both have.

    Raises:
        UserError: the task's criterion takes the model through more than one pass.
    """

    nats: ClassVar[tuple[str, ...]] = ("nll_loss",)

    def __init__(
        self, config: DistillationConfig, task: Criterion, teacher: Any, seed: int = 1, num_tokens: int | None = None
    ) -> None:
        if not task.is_single_pass():
            raise UserError(f"{named(task)} runs more than one pass, which `teacher` does not support")
        self.config, self._task, self._teacher, self._seed = config, task, teacher, seed
        self.num_tokens = num_tokens
        self.weighs = task.weighs
        self._trunk, self._head = trunk_and_head(teacher)
        self._projections: dict[int, Tensor] = {}  # layer of the teacher -> [H of the teacher, H]

    def count(self, batch: Batch) -> float:
        return self._task.count(batch)

    def loss(self, head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        """The loss of a batch.

        Args: as of `Criterion.loss`.

        Returns:
            Sum and count; the meters of the task's own loss and, per target of it, "task_loss" and "teacher_kl" (at the
            temperature, without T²); "nll_loss" where the task's own loss is in nats; what the task scores.
        """
        import torch

        from ftk.criterions.divergence import divergence

        output, num_targets = self._task.loss(head, hidden, batch), len(batch.targets)
        with torch.no_grad():
            read = self._trunk(**batch.inputs).flatten(0, 1)  # [B * T, H of the teacher]
            of_teacher = read.index_select(0, batch.places[:num_targets])
        temperature, weight = self.config.teacher_temperature, self.config.teacher_weight
        student = hidden[:num_targets]
        kl = divergence(head, student, self._head, of_teacher, temperature, batch.weights, self.num_tokens)
        count = output.num_targets
        meters = {"task_loss": (output.loss.detach(), count), "teacher_kl": (kl.detach(), count)}
        if "loss" in self._task.nats:
            meters["nll_loss"] = meters["task_loss"]  # unless the task has its own, under label smoothing
        loss = (1.0 - weight) * output.loss + weight * temperature**2 * kl
        return output._replace(loss=loss, meters={**meters, **output.meters})

    def __call__(self, model: Any, batch: Batch) -> LossOutput:
        """One forward pass of each model, and the loss at the batch's places; arguments as of `Criterion`."""
        if not self.config.teacher_hidden_weight:
            return super().__call__(model, batch)
        student_layers, teacher_layers = model.layers, self._teacher.layers
        pairs = self.config.layer_pairs(len(student_layers), len(teacher_layers))
        with (
            _outputs([student_layers[number] for number, _ in pairs]) as student_outputs,
            _outputs([teacher_layers[number] for _, number in pairs]) as teacher_outputs,
        ):
            output = super().__call__(model, batch)
        distances = [
            self._distances(_at_targets(student_outputs[pair], batch), _at_targets(teacher_outputs[pair], batch), layer)
            for pair, (_, layer) in enumerate(pairs)
        ]
        mean = sum(distances[1:], distances[0]) / len(pairs)  # [N]
        total = (mean if batch.weights is None else mean * batch.weights).sum()
        meters = {**output.meters, "teacher_hidden": (total.detach(), output.num_targets)}
        return output._replace(loss=output.loss + self.config.teacher_hidden_weight * total, meters=meters)

    def _distances(self, student: Tensor, teacher: Tensor, layer: int) -> Tensor:
        """Hidden states [N, H] and [N, H of the teacher] -> how far they are from each other, [N]"""
        from torch.nn import functional as F

        if student.size(1) != teacher.size(1):
            teacher = teacher @ self._projection(layer, teacher.size(1), student)
        if self.config.teacher_hidden_loss == "cosine":
            return 1.0 - F.cosine_similarity(student, teacher, dim=-1)
        return (student - teacher).square().mean(-1)

    def _projection(self, layer: int, width: int, student: Tensor) -> Tensor:
        """[H of the teacher, H] of a layer of the teacher: entries from N(0, 1/H), which keep the mean square."""
        from ftk.modules.initialization import Normal

        if layer not in self._projections:
            drawn = Normal(width**-0.5)(f"teacher.layers.{layer}.projection", (width, student.size(1)), self._seed)
            self._projections[layer] = drawn.to(student.device)
        return self._projections[layer]


@contextmanager
def _outputs(layers: Sequence[nn.Module]) -> Iterator[dict[int, Tensor]]:
    """What layers give in one forward pass inside, by their place in the argument."""
    outputs: dict[int, Tensor] = {}

    def keep(place: int) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda layer, given, output: outputs.update({place: output})

    hooks = [layer.register_forward_hook(keep(place)) for place, layer in enumerate(layers)]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _at_targets(states: Tensor, batch: Batch) -> Tensor:
    """[B, T', H], T' with tokens that the model puts in front of the T that it is given -> [N, H] float32"""
    tokens = batch.inputs.get("decoder_tokens", batch.inputs["tokens"])  # [B, T]
    return states[:, -tokens.size(1) :].flatten(0, 1).index_select(0, batch.places[: len(batch.targets)]).float()
