"""Transformer layers: one class for each place of the norms on the residual path."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from ftk.modules.attention import Attend, CrossAttend
from ftk.modules.dropout import Dropout


class TransformerLayer(nn.Module):
    """Pre-norm (Radford et al. 2019): a norm before attention and before the feed-forward network, both added.

    Args:
        attention: called as `attention(hidden, attend)`, such as `Attention`.
        feed_forward: hidden [B, T, H] -> [B, T, H].
        norm: makes a norm over H.
        dropout: probability with which a value of either output is dropped before it is added.
    """

    NORMS: ClassVar[tuple[str, ...]] = ("attention_norm", "feed_forward_norm")
    """Names of the norms over H."""

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


class PostNormLayer(TransformerLayer):
    """Post-norm (Vaswani et al. 2017): each norm after the residual addition.

    A model of such layers needs no final norm.
    """

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, attend)))
        return self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))


class SandwichLayer(TransformerLayer):
    """A norm before and behind attention and the feed-forward network, whose outputs are added (Ding et al. 2021)."""

    NORMS = (*TransformerLayer.NORMS, "attention_output_norm", "feed_forward_output_norm")

    def __init__(
        self, attention: nn.Module, feed_forward: nn.Module, norm: Callable[[], nn.Module], dropout: float = 0.0
    ) -> None:
        super().__init__(attention, feed_forward, norm, dropout)
        self.attention_output_norm = norm()
        self.feed_forward_output_norm = norm()

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        attended = self.attention(self.attention_norm(hidden), attend)
        hidden = hidden + self.dropout(self.attention_output_norm(attended))
        return hidden + self.dropout(self.feed_forward_output_norm(self.feed_forward(self.feed_forward_norm(hidden))))


class DecoderLayer(TransformerLayer):
    """A pre-norm layer behind an encoder: attention, attention to the encoder's states, feed-forward network.

    Args:
        attention, feed_forward, norm, dropout: as of `TransformerLayer`.
        cross_attention: called as `cross_attention(hidden, attend, memory)`, such as `CrossAttention`.
    """

    NORMS = (*TransformerLayer.NORMS, "cross_attention_norm")

    def __init__(
        self,
        attention: nn.Module,
        cross_attention: nn.Module,
        feed_forward: nn.Module,
        norm: Callable[[], nn.Module],
        dropout: float = 0.0,
    ) -> None:
        super().__init__(attention, feed_forward, norm, dropout)
        self.cross_attention_norm = norm()
        self.cross_attention = cross_attention

    def forward(self, hidden: Tensor, attend: CrossAttend) -> Tensor:  # type: ignore[override]
        """hidden [B, T, H] -> [B, T, H]"""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), attend.own))
        normal = self.cross_attention_norm(hidden)
        hidden = hidden + self.dropout(self.cross_attention(normal, attend.cross, attend.memory))
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


class PostNormDecoderLayer(DecoderLayer):
    """The same with each norm after the residual addition (Vaswani et al. 2017)."""

    def forward(self, hidden: Tensor, attend: CrossAttend) -> Tensor:  # type: ignore[override]
        """hidden [B, T, H] -> [B, T, H]"""
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, attend.own)))
        read = self.cross_attention(hidden, attend.cross, attend.memory)
        hidden = self.cross_attention_norm(hidden + self.dropout(read))
        return self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))


class ParallelLayer(nn.Module):
    """Parallel residual (Wang and Komatsuzaki 2021): attention and feed-forward network read the same norm, both added.

    Args:
        attention, feed_forward, norm, dropout: as of `TransformerLayer`.
    """

    NORMS: ClassVar[tuple[str, ...]] = ("norm",)

    def __init__(
        self, attention: nn.Module, feed_forward: nn.Module, norm: Callable[[], nn.Module], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm = norm()
        self.attention = attention
        self.feed_forward = feed_forward
        self.dropout = Dropout(dropout)

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        normal = self.norm(hidden)
        return hidden + self.dropout(self.attention(normal, attend)) + self.dropout(self.feed_forward(normal))
