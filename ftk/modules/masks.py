"""The blank-infilling mask, written once and offered in three forms: boolean, additive, flex BlockMask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

MaskPredicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def blank_predicate(context_length: Tensor, document_ids: Tensor | None = None) -> MaskPredicate:
    """Which key a query may see: every key of the context, and every key that is not later than itself.

    Args:
        context_length: [B] int64, number of leading tokens that all tokens see (0: plain causal attention).
        document_ids: [B, T] int64 or None; where given, a token sees only tokens with its own number.

    Returns:
        predicate(batch, head, query, key) -> bool; the arguments are indices of any shapes that broadcast,
        which is also the signature of a `mask_mod` of flex attention.

    Source: Du et al. 2022, section 2.1 and figure 2 (part A sees A; part B sees A and the earlier part of B).
    """

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) | (key < context_length[batch])

    if document_ids is None:
        return seen

    def seen_in_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen(batch, head, query, key) & (document_ids[batch, query] == document_ids[batch, key])

    return seen_in_document


def boolean_mask(context_length: Tensor, num_tokens: int, document_ids: Tensor | None = None) -> Tensor:
    """[B, 1, T, T] bool, True where a query (third axis) may see a key (fourth axis).

    Args: as `blank_predicate`; `num_tokens` is T.
    """
    predicate = blank_predicate(context_length, document_ids)
    batch = torch.arange(context_length.size(0), device=context_length.device)
    token = torch.arange(num_tokens, device=context_length.device)
    return predicate(batch[:, None, None, None], batch.new_zeros(()), token[:, None], token)


def additive_mask(
    context_length: Tensor,
    num_tokens: int,
    document_ids: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[B, 1, T, T] of `dtype`: 0 where a query may see a key, -inf elsewhere. No row is all -inf.

    Args: as `boolean_mask`.
    """
    mask = boolean_mask(context_length, num_tokens, document_ids)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def block_mask(
    context_length: Tensor, num_tokens: int, document_ids: Tensor | None = None, block_size: int = 128
) -> BlockMask:
    """The same mask for `torch.nn.attention.flex_attention`, blocks of `block_size` queries by as many keys.

    Args: as `boolean_mask`.
    """
    return create_block_mask(
        blank_predicate(context_length, document_ids),
        B=context_length.size(0),
        H=None,
        Q_LEN=num_tokens,
        KV_LEN=num_tokens,
        device=context_length.device,
        BLOCK_SIZE=block_size,
    )
