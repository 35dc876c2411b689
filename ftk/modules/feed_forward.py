"""The position-wise feed-forward network."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ftk.modules.linear import Linear


class FeedForward(nn.Module):
    """Two linear layers around a tanh-approximated GELU, as in GPT-2.

    Args:
        hidden_size: H.
        inner_size: width between the two layers, 4 H in GLM.
    """

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.inner = Linear(hidden_size, inner_size)
        self.output = Linear(inner_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        return self.output(F.gelu(self.inner(hidden), approximate="tanh"))
