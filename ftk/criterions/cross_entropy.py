"""Cross entropy for any model that maps tokens to logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftk.criterions.base import LossOutput
from ftk.errors import UserError
from ftk.registry import register_criterion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class CrossEntropyConfig:
    """Options of the cross-entropy criterions."""

    label_smoothing: float = field(
        default=0.0,
        metadata={"help": "share of the target mass spread evenly over the vocabulary, in [0, 1)"},
    )

    def validate(self) -> Iterator[str]:
        if not 0.0 <= self.label_smoothing < 1.0:
            yield f"label_smoothing is {self.label_smoothing}; it must be in [0, 1)"


@register_criterion("cross_entropy", config=CrossEntropyConfig)
class CrossEntropy:
    """Negative log-likelihood of the target tokens, summed, with their count.

    Args:
        config: label smoothing.
    """

    def __init__(self, config: CrossEntropyConfig) -> None:
        self.config = config

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> LossOutput:
        """The loss of `model(tokens) -> logits [B, T, V]`.

        Args:
            model: any callable on tokens.
            batch: tokens [B, T] int64, targets [B, T] int64, loss_mask [B, T] bool; optionally
                loss_positions [N] int64, the places of the flattened loss_mask that are True.

        Returns:
            Sum and count; under label smoothing also the meter "nll_loss", the likelihood without it.
        """
        from ftk.criterions.token_loss import loss_positions, token_losses

        if "context_length" in batch:
            raise UserError(
                "criterion cross_entropy gives the model tokens alone, but these samples have a context "
                "with blanks; use --criterion glm_cross_entropy"
            )

        where = loss_positions(batch)  # [N]
        logits = model(batch["tokens"])  # [B, T, V]
        targets = batch["targets"].flatten().index_select(0, where)  # [N]
        losses, nll = token_losses(logits.flatten(0, 1).index_select(0, where), targets, self.config.label_smoothing)
        num_targets = targets.new_full((), targets.numel())
        meters = {"nll_loss": (nll.detach().sum(), num_targets)} if self.config.label_smoothing else {}
        return LossOutput(losses.sum(), num_targets, meters)
