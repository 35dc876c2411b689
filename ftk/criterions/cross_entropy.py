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
    loss_form: str = field(
        default="auto",
        metadata={
            "resume": "free",
            "help": "how logits and loss are made: plain (all logits of the batch's targets at once), chunked (some at "
            "a time, gradients made along), linear (torch's linear_cross_entropy), auto (plain for few, else chunked)",
            "choices": ("auto", "plain", "chunked", "linear"),
        },
    )
    loss_chunk_tokens: int = field(
        default=1024,
        metadata={
            "resume": "free",
            "help": "targets whose logits exist at a time in the forms chunked and linear",
            "unit": "tokens",
        },
    )

    def validate(self) -> Iterator[str]:
        if not 0.0 <= self.label_smoothing < 1.0:
            yield f"label_smoothing is {self.label_smoothing}; it must be in [0, 1)"
        if self.loss_chunk_tokens < 1:
            yield f"loss_chunk_tokens is {self.loss_chunk_tokens}; it must be at least 1"


@register_criterion("cross_entropy", config=CrossEntropyConfig)
class CrossEntropy:
    """Negative log-likelihood of the target tokens, summed, with their count.

    Args:
        config: label smoothing, and in which form the loss is computed.
    """

    def __init__(self, config: CrossEntropyConfig) -> None:
        self.config = config

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> LossOutput:
        """The loss of `model(tokens) -> logits [B, T, V]`.

        Args:
            model: any callable on tokens. If it offers `hidden_states` and `logits` as well
                (`ftk.models.base.LanguageModel`), logits are made only where there is loss.
            batch: tokens [B, T] int64, targets [B, T] int64, loss_mask [B, T] bool; optionally
                loss_positions [N] int64, the places of the flattened loss_mask that are True.

        Returns:
            Sum and count; under label smoothing also the meter "nll_loss", the likelihood without it.

        Raises:
            UserError: the samples have blanks, or the model does not fit the form of the loss.
        """
        from ftk.criterions.loss_forms import needs_output_weight, output_loss
        from ftk.criterions.token_loss import loss_positions, token_losses

        if "context_length" in batch:
            raise UserError(
                "criterion cross_entropy gives the model tokens alone, but these samples have a context "
                "with blanks; use --criterion glm_cross_entropy"
            )

        where = loss_positions(batch)  # [N]
        targets = batch["targets"].flatten().index_select(0, where)  # [N]
        if hasattr(model, "hidden_states"):
            hidden = model.hidden_states(batch["tokens"])  # [B, T, H]
            computed = output_loss(model, hidden.flatten(0, 1).index_select(0, where), targets, self.config)
        elif self.config.loss_form in ("auto", "plain"):
            logits = model(batch["tokens"])  # [B, T, V]
            logits = logits.flatten(0, 1).index_select(0, where)  # [N, V]
            computed = token_losses(logits, targets, self.config.label_smoothing)
        else:
            raise UserError(needs_output_weight(model, self.config.loss_form))
        num_targets = targets.new_full((), targets.numel())
        meters = {"nll_loss": (computed.nll.sum(), num_targets)} if self.config.label_smoothing else {}
        return LossOutput(computed.total, num_targets, meters)
