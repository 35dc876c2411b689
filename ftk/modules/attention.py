"""Multi-head self-attention; which keys a query sees, and where they are kept, is up to `attend`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from ftk.errors import UserError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [B, A, T, D], key [B, A, T, D], value [B, A, T, D]) -> attended [B, A, T, D]"""


class Attention(nn.Module):
    """Scaled dot-product attention with a joint query-key-value projection (Vaswani et al. 2017, 3.2).

    The rows of the projection are laid out per head, [heads, 3, head_size], so that a shard of rows is a set
    of whole heads for every tensor-parallel degree that divides the heads.

    Args:
        hidden_size: H.
        num_heads: A; must divide H.
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise UserError(f"num_attention_heads {num_heads} does not divide hidden_size {hidden_size}; change one")
        self.head_size = hidden_size // num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]; `attend` mixes the values, see `Attend`."""
        qkv = self.qkv(hidden).unflatten(-1, (-1, 3, self.head_size))  # [B, T, A, 3, D]
        query, key, value = qkv.transpose(1, 2).unbind(3)  # each [B, A, T, D]
        attended = attend(query, key, value)  # [B, A, T, D]
        return self.output(attended.transpose(1, 2).flatten(2))


class MaskedAttention(NamedTuple):
    """An `attend` callable for a whole sequence at once, used in training and scoring.

    A named tuple, so that torch.compile, activation checkpointing and pipelining see the tensor inside.

    Args:
        mask: [B, 1, T, T] bool, True where a query may see a key (`ftk.modules.masks.boolean_mask`).
        dropout: probability with which an attention weight is dropped; the caller passes 0 outside training.
    """

    mask: Tensor
    dropout: float = 0.0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask, dropout_p=self.dropout)
