"""The greatest of many scores, in an order that is defined for equal scores, too."""

from __future__ import annotations

import torch
from torch import Tensor


def stable_topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest of [..., X] and where they are, greatest first: the head of a stable sort.

    Of equal ones those that stand first are taken, and stand first. `torch.topk` promises neither, and equal scores are
    common in bfloat16 and with int8 weights.
    """
    num_scores = scores.size(-1)
    values, indices = scores.topk(min(count + 1, num_scores), dim=-1)
    no_looking = not reads_are_free(scores.device)
    if count < num_scores and (no_looking or (values[..., -2] == values[..., -1]).any()):
        found = _first_of_ties(scores, values[..., :-1], indices[..., :-1])
    else:
        found = indices[..., :count]
    found = found.sort(dim=-1).values
    values, order = scores.gather(-1, found).sort(dim=-1, descending=True, stable=True)
    return values, found.gather(-1, order)


def reads_are_free(device: torch.device) -> bool:
    """Whether the host reads values of this device without waiting: true on a CPU only."""
    return device.type == "cpu"


def _first_of_ties(scores: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    """Where the greatest of [..., X] are, given what `topk` found: of those equal to the last value the first ones.

    Args:
        values: [..., K], the greatest, greatest first.
        indices: int64 [..., K], where they are; of ties at the last value anywhere.

    Returns:
        int64 [..., K].
    """
    last = values[..., -1:]  # NaN equals nothing, and is left where it is
    numbers = torch.arange(scores.size(-1), device=scores.device)
    tied = torch.where(scores == last, numbers, scores.size(-1)).topk(values.size(-1), dim=-1, largest=False).values
    greater = (values != last).sum(-1, keepdim=True)
    places = torch.arange(values.size(-1), device=scores.device) - greater  # below 0: not tied
    return torch.where(values == last, tied.gather(-1, places.clamp(min=0)), indices)
