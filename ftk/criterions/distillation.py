"""Knowledge distillation: a task's own loss plus the divergence from the probabilities of a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ftk.criterions.base import Criterion, LossOutput, trunk_and_head
from ftk.errors import UserError
from ftk.registry import named

if TYPE_CHECKING:
    from torch import Tensor

    from ftk.batch import Batch
    from ftk.modules.heads import Head


@dataclass(kw_only=True)
class DistillationConfig:
    teacher: str | None = field(
        default=None,
        metadata={
            "help": "a trained model with the same tokenizer, whose probabilities are learned, too: checkpoint, run or "
            "Hugging Face folder",
            "metavar": "PATH",
        },
    )
    teacher_weight: float = field(
        default=0.5,
        metadata={
            "needs": {"teacher": True},
            "help": "weight of the teacher's probabilities in the loss, above 0 and at most 1; the targets have the "
            "rest",
        },
    )
    teacher_temperature: float = field(
        default=2.0,
        metadata={
            "needs": {"teacher": True},
            "help": "logits of both models are divided by this before they are compared: the higher, the more small "
            "probabilities count",
        },
    )

    def validate(self) -> Iterator[str]:
        if self.teacher == "":
            yield "teacher is empty; it must name a folder"
        if not 0.0 < self.teacher_weight <= 1.0:
            yield f"teacher_weight is {self.teacher_weight}; it must be above 0 and at most 1"
        if not 0.0 < self.teacher_temperature < float("inf"):
            yield f"teacher_temperature is {self.teacher_temperature}; it must be a number above 0"


class Distillation(Criterion):
    """(1 - w) times a task's own loss and w T² times KL(teacher || student) at the temperature T, summed over the
    targets (Hinton et al. 2015, section 2). T² keeps the size of the gradients.

    Where models have other numbers of rows for one vocabulary, which they pad, the rows that both have are compared.

    Args:
        config: weight w and temperature T.
        own: the task's criterion, which counts the targets.
        teacher: reads the inputs of the model that is trained; frozen, in evaluation mode, whole on this process. It is
            no part of the module that computes the loss, so that it is neither sharded nor saved.

    Raises:
        UserError: the task's criterion takes the model through more than one pass.
    """

    nats: ClassVar[tuple[str, ...]] = ("nll_loss",)

    def __init__(self, config: DistillationConfig, own: Criterion, teacher: Any) -> None:
        if not own.is_single_pass():
            raise UserError(f"{named(own)} takes the model through passes of its own, and has no `teacher`")
        self.config, self.own = config, own
        self._trunk, self._head = trunk_and_head(teacher)

    def count(self, batch: Batch) -> float:
        return self.own.count(batch)

    def loss(self, head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        """The loss of a batch.

        Args: as of `Criterion.loss`.

        Returns:
            Sum and count; the meters of the task's own loss and, per target of it, "task_loss" and "teacher_kl" (at the
            temperature, without T²); "nll_loss" where the task's own loss is in nats; what the task scores.
        """
        import torch

        from ftk.criterions.divergence import divergence

        own, num_targets = self.own.loss(head, hidden, batch), len(batch.targets)
        with torch.no_grad():
            read = self._trunk(**batch.inputs).flatten(0, 1)  # [B * T, H of the teacher]
            of_teacher = read.index_select(0, batch.places[:num_targets])
        temperature, weight = self.config.teacher_temperature, self.config.teacher_weight
        kl = divergence(head, hidden[:num_targets], self._head, of_teacher, temperature, batch.weights)
        meters = {"task_loss": (own.loss.detach(), own.num_targets), "teacher_kl": (kl.detach(), own.num_targets)}
        if "loss" in self.own.nats:
            meters["nll_loss"] = meters["task_loss"]  # unless the task has its own, under label smoothing
        loss = (1.0 - weight) * own.loss + weight * temperature**2 * kl
        return own._replace(loss=loss, meters={**meters, **own.meters})
