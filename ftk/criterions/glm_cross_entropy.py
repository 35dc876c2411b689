"""The loss of autoregressive blank infilling, with a meter for each objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftk.criterions.base import LossOutput
from ftk.criterions.cross_entropy import CrossEntropyConfig
from ftk.registry import register_criterion

if TYPE_CHECKING:
    from torch import Tensor

    from ftk.models.base import LanguageModel

OBJECTIVES = ("token", "sentence", "document")
"""What the numbers in a batch's `objective` stand for."""


@dataclass(kw_only=True)
class GLMCrossEntropyConfig(CrossEntropyConfig):
    """Options of the blank-infilling loss."""


@register_criterion("glm_cross_entropy", config=GLMCrossEntropyConfig)
class GLMCrossEntropy:
    """Negative log-likelihood of the blanks' tokens (Du et al. 2022, eq. 1 and 2), summed, with their count.

    Hidden states are gathered where there is loss before the output layer: [B, T, V] never exists.

    Args:
        config: label smoothing, and in which form the loss is computed.
    """

    def __init__(self, config: GLMCrossEntropyConfig) -> None:
        self.config = config

    def __call__(self, model: LanguageModel, batch: Mapping[str, Tensor]) -> LossOutput:
        """The loss of a blank-infilling batch.

        Args:
            model: offers `hidden_states` and `logits`, and for the fused forms of the loss `output_weight`, see
                `ftk.models.base.LanguageModel`.
            batch: tokens [B, T], targets [B, T], position_ids [B, 2, T], context_length [B], all int64, and
                loss_mask [B, T] bool; optionally document_ids [B, T] int64, which goes to the model,
                objective [B] int64 (see `OBJECTIVES`) and loss_positions [N] int64, the places of the flattened
                loss_mask that are True.

        Returns:
            Sum and count; with `objective` in the batch the meters "loss_token", "loss_sentence" and
            "loss_document"; under label smoothing "nll_loss", the likelihood without it.
        """
        from ftk.criterions.loss_forms import output_loss
        from ftk.criterions.token_loss import loss_positions

        where = loss_positions(batch)  # [N]
        apart = {"document_ids": batch["document_ids"]} if "document_ids" in batch else {}
        hidden = model.hidden_states(
            batch["tokens"], position_ids=batch["position_ids"], context_length=batch["context_length"], **apart
        )  # [B, T, H]
        targets = batch["targets"].flatten().index_select(0, where)  # [N]
        computed = output_loss(model, hidden.flatten(0, 1).index_select(0, where), targets, self.config)
        num_targets = targets.new_full((), targets.numel())
        meters: dict[str, tuple[Tensor, Tensor]] = {}
        if "objective" in batch:
            sample = where // batch["tokens"].size(1)  # [N]
            meters |= _objective_meters(computed.losses, batch["objective"].index_select(0, sample))
        if self.config.label_smoothing:
            meters["nll_loss"] = (computed.nll.sum(), num_targets)
        return LossOutput(computed.total, num_targets, meters)


def _objective_meters(losses: Tensor, objective: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """losses [N], objective [N] -> per objective the sum and the count of its target tokens."""
    import torch

    sums = losses.new_zeros(len(OBJECTIVES)).index_add(0, objective, losses)
    counts = objective.new_zeros(len(OBJECTIVES)).index_add(0, objective, torch.ones_like(objective))
    return {f"loss_{name}": (sums[i], counts[i]) for i, name in enumerate(OBJECTIVES)}
