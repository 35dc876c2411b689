"""The loss of classification, whatever is predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ftk.config.options import option
from ftk.criterions.base import Criterion, LossOutput
from ftk.criterions.choice_cross_entropy import choice_output
from ftk.data.supervised.labelled import NAMED
from ftk.registry import register_criterion

if TYPE_CHECKING:
    from torch import Tensor

    from ftk.batch import Batch
    from ftk.modules.heads import Head


@dataclass(kw_only=True)
class ClassificationLossConfig:
    label_smoothing: float = option(
        0.0, "share of the target mass spread evenly over the labels", "[0, 1)", needs={"kind": NAMED}
    )


@register_criterion("classification", config=ClassificationLossConfig, task="classification")
class Classification(Criterion):
    """Cross entropy of labels, or of the right one of the choices of a question; squared error of numbers.

    The targets of a batch say which it is: int64 [N] labels; float32 [N] numbers; bool [N], which choice is right, with
    the extras of `ChoiceCrossEntropy`. Of labels and numbers the extra `begins` bool [N] says where a row's first is.

    Args:
        config: label smoothing.
    """

    nats: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ClassificationLossConfig) -> None:
        self.config = config

    def count(self, batch: Batch) -> float:
        return float(batch.extras["answerable"].sum()) if "answerable" in batch.extras else super().count(batch)

    def loss(self, head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        """The loss of a batch.

        Args: as of `Criterion.loss`; the head gives K scores.

        Returns:
            Sum and count; of labels and choices the meter "accuracy".
        """
        import torch

        from ftk.criterions.token_loss import token_losses

        scores, targets, weights = head(hidden).float(), batch.targets, batch.weights  # [N, K]
        if "question" in batch.extras:
            return choice_output(scores.squeeze(-1), scores.new_ones(len(scores), dtype=torch.bool), targets, batch)
        number = torch.full((), len(targets), device=scores.device)
        count, meters = number if weights is None else weights.sum(), {}
        if targets.is_floating_point():
            found = scores.squeeze(-1)
            loss = (found - targets).square().sum()
        else:
            found = scores.detach().argmax(-1)
            loss = token_losses(scores, targets, self.config.label_smoothing, weights).total
            meters["accuracy"] = (torch.eq(found, targets).sum(), number)
        scored = None
        if not torch.is_grad_enabled():  # validation: a task makes figures of all that was found
            scored = torch.stack([batch.extras["begins"].float(), targets.float(), found.float()], dim=1)
        return LossOutput(loss, count, meters, scored)
