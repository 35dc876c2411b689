"""One pre-norm transformer layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ftk.modules.attention import Attend
from ftk.modules.dropout import Dropout


class TransformerLayer(nn.Module):
    """Self-attention and a feed-forward network, each after a norm and added to the residual path.

    Args:
        attention: called as `attention(hidden, attend)`, such as `Attention`.
        feed_forward: hidden [B, T, H] -> [B, T, H].
        norm: makes a norm over H.
        dropout: probability with which a value of either output is dropped before it is added.
    """

    def __init__(
        self, attention: nn.Module, feed_forward: nn.Module, norm: Callable[[], nn.Module], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.feed_forward_norm = norm()
        self.feed_forward = feed_forward
        self.dropout = Dropout(dropout)

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), attend))
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
