"""Cross entropy, the loss of every language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.criterions.base import Criterion, LossOutput
from ftk.criterions.config import CrossEntropyConfig
from ftk.registry import register_criterion

if TYPE_CHECKING:
    from torch import Tensor

    from ftk.batch import Batch, Group
    from ftk.modules.heads import Head


@register_criterion("cross_entropy", config=CrossEntropyConfig)
class CrossEntropy(Criterion):
    """Negative log-likelihood of the target tokens, summed, with their count: the loss of every language model.

    Hidden states are gathered where there is loss before the output layer: [B, T, V] never exists.

    Args:
        config: label smoothing, and in which form the loss is computed.
    """

    weighs = True

    def __init__(self, config: CrossEntropyConfig) -> None:
        self.config = config

    def loss(self, head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        """The loss of a batch with targets [N] int64.

        Args: as of `Criterion.loss`.

        Returns:
            Sum and count; for each group of the batch the meters "loss_<name>"; under label smoothing "nll_loss", the
            likelihood without it.

        Raises:
            UserError: the model's head does not fit the form of the loss.
        """
        from ftk.criterions.loss_forms import output_loss

        computed = output_loss(head, hidden, batch.targets, self.config, batch.weights)
        weights = batch.weights
        num_targets = batch.targets.new_full((), batch.targets.numel()) if weights is None else weights.sum()
        meters: dict[str, tuple[Tensor, Tensor]] = {}
        for group in batch.groups.values():
            meters |= group_meters(group, computed.losses, weights)
        if self.config.label_smoothing:
            meters["nll_loss"] = (computed.nll.sum(), num_targets)
        return LossOutput(computed.total, num_targets, meters)


def group_meters(group: Group, losses: Tensor, weights: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """The sum and the count of each group's targets, by the meter's name.

    Args:
        group: of the batch.
        losses: [N] float32, detached, times the weights.
        weights: [N] float32 or None.
    """
    import torch

    counted = torch.ones_like(group.index) if weights is None else weights  # [N]
    sums = losses.new_zeros(len(group.names)).index_add(0, group.index, losses)
    counts = counted.new_zeros(len(group.names)).index_add(0, group.index, counted)
    return {f"loss_{name}": (sums[i], counts[i]) for i, name in enumerate(group.names)}
