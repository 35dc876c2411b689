"""Attention of all queries to all keys, under a mask: by torch's fused kernels, or in single operators."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ftk.modules.attention import Front
from ftk.modules.dropout import dropout_matmul
from ftk.modules.masks import Visibility
from ftk.registry import register_attention

HALF = (torch.bfloat16, torch.float16)


class MaskedAttention(NamedTuple):
    """An `Attend` for a whole sequence at once, used in training and scoring: torch's fused kernels.

    Args:
        mask: [B, 1, T, S] bool, True where a query may see a key (`Visibility.boolean`); None: the kernels need none.
        dropout: probability with which an attention weight is dropped; the caller passes 0 outside training.
        is_causal: without a mask: a query sees nothing later than itself; else it sees all.
        front: what all queries see besides.
    """

    mask: Tensor | None
    dropout: float = 0.0
    is_causal: bool = False
    front: Front | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        how = self.mask, self.is_causal, self.dropout
        return fused_attention(query, key, value, *how, bias=bias, scale=scale, front=self.front)


class EagerAttention(NamedTuple):
    """The same in single operators, as the textbook writes it; scores and weights are in the inputs' type.

    Args:
        mask: [B, 1, T, S], 0 where a query may see a key and -inf elsewhere (`Visibility.additive`); each query sees at
            least one. None: all is seen.
        dropout, front: as in `MaskedAttention`.
    """

    mask: Tensor | None
    dropout: float = 0.0
    front: Front | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        mask = self.mask
        if self.front is not None:
            mask, bias = self.front.seen(mask), self.front.seen(bias)
            key, value = self.front.joined(key, value)
        if (group := query.size(1) // key.size(1)) > 1:
            key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))  # [B, A, S, D]
        scores = (query * (query.size(-1) ** -0.5 if scale is None else scale)) @ key.transpose(-1, -2)  # [B, A, T, S]
        if mask is not None:
            # Added, not filled in: the gradient passes an addition as it is, and softmax's is 0 where the weight is.
            scores = scores.add_(mask.to(scores.dtype))
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        return dropout_matmul(scores.softmax(dim=-1).to(value.dtype), value, self.dropout)


@register_attention("sdpa")
def sdpa(
    visibility: Visibility,
    num_tokens: int,
    device: torch.device,
    dropout: float,
    dtype: torch.dtype,
    num_keys: int | None = None,
) -> MaskedAttention:
    if visibility.is_causal_alone or visibility.sees_all:
        return MaskedAttention(None, dropout, visibility.causal)
    return MaskedAttention(visibility.boolean(*_places(num_tokens, num_keys, device)), dropout)


def by_mask(
    visibility: Visibility,
    dropout: float,
    front: Front | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float | None,
) -> Tensor:
    """What `sdpa` gives, for the forms that have no mask which a bias or keys in front could be added to."""
    attend = sdpa(visibility, query.size(2), query.device, dropout, query.dtype, key.size(2))
    return attend._replace(front=front)(query, key, value, bias=bias, scale=scale)


@register_attention("eager")
def eager(
    visibility: Visibility,
    num_tokens: int,
    device: torch.device,
    dropout: float,
    dtype: torch.dtype,
    num_keys: int | None = None,
) -> EagerAttention:
    if visibility.sees_all:
        return EagerAttention(None, dropout)
    return EagerAttention(visibility.additive(*_places(num_tokens, num_keys, device), dtype), dropout)


def _places(num_tokens: int, num_keys: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions of the queries, [T], and of the keys, [S]."""
    queries = torch.arange(num_tokens, device=device)
    return queries, queries if num_keys is None else torch.arange(num_keys, device=device)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool = False,
    dropout: float = 0.0,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    front: Front | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` with a bias on the scores in addition to the mask.

    Args:
        query: [B, A, T, D].
        key, value: [B, K, S, D].
        mask: bool, True where a query sees a key, or float, added to the scores; None: all is seen.
        is_causal: without a mask: a query sees nothing later than itself.
        dropout: probability with which an attention weight is dropped.
        bias, scale: as in `Attend`.
        front: what all queries see besides; mask and bias are those of the other keys.
    """
    grouped = query.size(1) != key.size(1)
    folds = grouped and _has_no_grouped_kernel(query)
    if is_causal and (bias is not None or front is not None or (folds and query.dtype not in HALF)):
        mask, is_causal = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril(), False
    if front is not None:
        mask, bias = front.seen(mask), front.seen(bias)
        key, value = front.joined(key, value)
    if bias is not None:
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask
        mask = bias.to(query.dtype)
    if not folds or (mask is None and query.dtype in HALF):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
    # The queries of a group as more queries of one head.
    group, count = query.size(1) // key.size(1), query.size(2)
    query = query.unflatten(1, (-1, group)).flatten(2, 3)  # [B, K, A/K T, D]
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        if mask.size(1) == 1:
            mask = mask.expand(-1, group, count, -1).flatten(1, 2)[:, None]  # [B, 1, A/K T, S]
        else:
            mask = mask.expand(-1, -1, count, -1).unflatten(1, (-1, group)).flatten(2, 3)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    return attended.unflatten(2, (group, count)).flatten(1, 2)


def _has_no_grouped_kernel(query: Tensor) -> bool:
    """Whether query heads that share keys have only a slow kernel, under a mask or in float32: flash takes neither of
    these, and the efficient kernel no shared keys."""
    return query.is_cuda


def step_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    front: Front | None = None,
) -> Tensor:
    """The same for a few queries a row, as steps of generation have them, without a backward pass.

    Args:
        query: [R, A, W, D].
        key, value: [R, K, S, D].
        mask: added to the scores, of a shape that broadcasts with [R, 1, W, S]; None: all is seen.
        bias, scale, front: as of `fused_attention`.

    Returns:
        attended [R, A, W, D]
    """
    # The fused kernels of a CPU take up to twice as long for one query per row.
    if query.device.type != "cpu" or (query.dtype != torch.float32 and query.size(2) > 1):
        return fused_attention(query, key, value, mask, bias=bias, scale=scale, front=front)
    shape, per_key = query.shape, (query.size(0), key.size(1), -1, query.size(-1))
    query = (query * (query.size(-1) ** -0.5 if scale is None else scale)).reshape(per_key)  # [R, K, A/K W, D]
    scores = (query @ key.mT).view(*shape[:-1], key.size(2))  # [R, A, W, S]
    if mask is not None:
        scores += mask
    if bias is not None:
        scores += bias
    if front is None:
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return (weights.view(*query.shape[:-1], key.size(2)) @ value).view(shape)
    # Scores are put together, not keys, which would be copied in each step.
    first = (query @ front.key.to(query.dtype).mT).view(*shape[:-1], front.length)
    weights = torch.cat((first, scores), dim=-1).softmax(-1, dtype=torch.float32).to(value.dtype)
    ahead, own = weights.view(*query.shape[:-1], -1).split((front.length, key.size(2)), dim=-1)
    return (ahead @ front.value.to(value.dtype) + own @ value).view(shape)
