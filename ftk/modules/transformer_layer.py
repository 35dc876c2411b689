"""One pre-norm transformer layer."""

from __future__ import annotations

from torch import Tensor, nn

from ftk.modules.attention import Attend, Attention
from ftk.modules.dropout import Dropout
from ftk.modules.feed_forward import FeedForward


class TransformerLayer(nn.Module):
    """Self-attention and a feed-forward network, each after a layer norm and added to the residual path.

    Args:
        hidden_size: H.
        num_heads: A.
        inner_size: width of the feed-forward network.
        dropout: probability with which a value of either output is dropped before it is added.
        layer_norm_eps: added to the variance in the layer norms.
        init_std, output_std: of the initial weights; the latter of the layers that write into the residual path.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        inner_size: int,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        *,
        init_std: float = 0.02,
        output_std: float = 0.02,
    ) -> None:
        super().__init__()
        spread = {"init_std": init_std, "output_std": output_std}
        self.attention_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.attention = Attention(hidden_size, num_heads, **spread)
        self.feed_forward_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.feed_forward = FeedForward(hidden_size, inner_size, **spread)
        self.dropout = Dropout(dropout)

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), attend))
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
