"""Cross entropy token by token, at the positions that carry loss."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class TokenLosses(NamedTuple):
    """The loss of N target tokens: the sum that is minimised, and what it is made of, for meters.

    Attributes:
        total: 0-d float32, the sum of `losses`; the only one to go backward from.
        losses: [N] float32, detached, times the targets' weights.
        nll: [N] float32, detached: the negative log-likelihood, without smoothing, times the weights.
    """

    total: Tensor
    losses: Tensor
    nll: Tensor


def token_losses(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, weights: Tensor | None = None
) -> TokenLosses:
    """Cross entropy in float32, natural logarithm.

    With smoothing e the target is (1 - e) on the true token plus e / V on each of the V rows of the logits,
    the true one and the padding rows of the vocabulary included, as in the original (Szegedy et al. 2016, 7).

    Args:
        logits: [N, V], any floating type.
        targets: [N] int64.
        label_smoothing: e, in [0, 1).
        weights: [N] float32, factors of the losses; None: 1.
    """
    if label_smoothing == 0.0:
        losses = nll = F.cross_entropy(logits.float(), targets, reduction="none")
    else:
        losses, nll = smoothed(F.log_softmax(logits.float(), dim=-1), targets, label_smoothing)
    return weighted(losses, nll, weights)


def weighted(losses: Tensor, nll: Tensor, weights: Tensor | None) -> TokenLosses:
    """losses, nll, weights [N] float32, the weights perhaps None -> both times the weights, and their sum."""
    if weights is not None:
        losses, nll = losses * weights, nll * weights
    return TokenLosses(losses.sum(), losses.detach(), nll.detach())


def smoothed(log_probs: Tensor, targets: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """log_probs [N, V], targets [N] -> the smoothed losses [N] and the likelihoods without smoothing [N]."""
    nll = -log_probs.gather(1, targets[:, None]).squeeze(1)
    if label_smoothing == 0.0:
        return nll, nll
    return (1.0 - label_smoothing) * nll - label_smoothing * log_probs.mean(dim=-1), nll
