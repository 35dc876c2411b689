"""One gradient norm: measured once, used to clip and to tell whether the update is sound."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Euclidean norm of all gradients taken as one vector.

    Returns:
        0-d tensor on the gradients' device; nothing is read by the host.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return nn.utils.get_total_norm(gradients)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scale all gradients in place by `max_norm / norm` where `norm` is above `max_norm`.

    Args:
        parameters: the parameters whose norm was measured.
        max_norm: 0 leaves the gradients alone.
        norm: 0-d, from `gradient_norm`.
    """
    if max_norm > 0.0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def is_non_finite(*values: torch.Tensor) -> torch.Tensor:
    """Whether any of the given 0-d tensors is infinite or not a number: a 0-d bool tensor on their device."""
    return ~torch.stack([value.detach().float() for value in values]).isfinite().all()
