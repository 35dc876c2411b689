"""The loss of masked language modeling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.criterions.base import LossOutput
from ftk.criterions.config import CrossEntropyConfig
from ftk.criterions.cross_entropy import CrossEntropy
from ftk.registry import register_criterion

if TYPE_CHECKING:
    from torch import Tensor

    from ftk.batch import Batch
    from ftk.modules.heads import Head


@register_criterion("masked_lm", config=CrossEntropyConfig, task="masked_lm")
class MaskedLM(CrossEntropy):
    """Cross entropy of the masked tokens, and for pairs that of whether the second part follows the first.

    Both are means, which are added (Devlin et al. 2019, appendix A.2); a pair weighs as many targets as it has, so
    that the sum over batches and processes is the same whatever their sizes.

    Args:
        config: as of `CrossEntropy`.
    """

    weighs = True

    def loss(self, head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        """The loss of a batch with targets [N] int64.

        Args:
            head: of the model; for pairs with `next_sentence`.
            hidden: [N, H]; for pairs [N + B, H], the last ones of the samples' first tokens.
            batch: for pairs with the extras random_next int64 [B] and pair_weights float32 [B].

        Returns:
            Sum and count; for pairs also the meters "nll_loss" (of the tokens), "loss_pairs" and "pair_accuracy".
        """
        if "random_next" not in batch.extras:
            return super().loss(head, hidden, batch)
        import torch
        from torch.nn import functional as F

        num_targets = len(batch.targets)
        masked = super().loss(head, hidden[:num_targets], batch)
        scores = head.next_sentence(hidden[num_targets:]).float()  # type: ignore[attr-defined]  # [B, 2]
        labels, weights = batch.extras["random_next"], batch.extras["pair_weights"]
        losses = F.cross_entropy(scores, labels, reduction="none") * weights  # [B]
        num_pairs = labels.new_full((), len(labels))
        meters = {
            "nll_loss": (masked.loss.detach(), masked.num_targets),
            **masked.meters,
            "loss_pairs": (losses.detach().sum(), weights.sum()),
            "pair_accuracy": (torch.eq(scores.argmax(-1), labels).sum(), num_pairs),
        }
        return LossOutput(masked.loss + losses.sum(), masked.num_targets, meters)
