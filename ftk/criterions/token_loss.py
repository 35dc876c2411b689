"""Cross entropy token by token, at the positions that carry loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class TokenLosses(NamedTuple):
    """Per target token: what is minimised, and the negative log-likelihood without smoothing."""

    losses: Tensor  # [N] float32
    nll: Tensor  # [N] float32


def token_losses(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> TokenLosses:
    """Cross entropy in float32, natural logarithm.

    With smoothing e the target is (1 - e) on the true token plus e / V on each of the V rows of the logits,
    the true one and the padding rows of the vocabulary included, as in the original (Szegedy et al. 2016, 7).

    Args:
        logits: [N, V], any floating type.
        targets: [N] int64.
        label_smoothing: e, in [0, 1).
    """
    if label_smoothing == 0.0:
        nll = F.cross_entropy(logits.float(), targets, reduction="none")
        return TokenLosses(nll, nll)
    log_probs = F.log_softmax(logits.float(), dim=-1)  # [N, V]
    nll = -log_probs.gather(1, targets[:, None]).squeeze(1)
    return TokenLosses((1.0 - label_smoothing) * nll - label_smoothing * log_probs.mean(dim=-1), nll)


def loss_positions(batch: Mapping[str, Tensor]) -> Tensor:
    """Where the flattened [B * T] tokens carry loss: int64 [N], rising.

    A collater that put `loss_positions` into the batch saves an accelerator the wait for this count;
    otherwise they are found from `loss_mask` [B, T].
    """
    if "loss_positions" in batch:
        return batch["loss_positions"]
    return batch["loss_mask"].flatten().nonzero().squeeze(1)
