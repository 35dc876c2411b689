"""The position-wise feed-forward network."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ftk.modules.initialization import Normal, declare


class FeedForward(nn.Module):
    """Two linear layers around a tanh-approximated GELU, as in GPT-2.

    Args:
        hidden_size: H.
        inner_size: width between the two layers.
        init_std, output_std: of the initial weights of the first and the second layer.
    """

    def __init__(self, hidden_size: int, inner_size: int, *, init_std: float = 0.02, output_std: float = 0.02) -> None:
        super().__init__()
        self.inner = declare(nn.Linear(hidden_size, inner_size), weight=Normal(init_std))
        self.output = declare(nn.Linear(inner_size, hidden_size), weight=Normal(output_std))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        return self.output(F.gelu(self.inner(hidden), approximate="tanh"))


class GatedFeedForward(nn.Module):
    """A linear layer times another that is activated, and one behind (Shazeer 2020): output(silu(gate(x)) * inner(x)).

    Args:
        hidden_size: H.
        inner_size: width in between.
        init_std, output_std: of the initial weights of the first two layers and of the last.
    """

    def __init__(self, hidden_size: int, inner_size: int, *, init_std: float = 0.02, output_std: float = 0.02) -> None:
        super().__init__()
        self.gate = declare(nn.Linear(hidden_size, inner_size, bias=False), weight=Normal(init_std))
        self.inner = declare(nn.Linear(hidden_size, inner_size, bias=False), weight=Normal(init_std))
        self.output = declare(nn.Linear(inner_size, hidden_size, bias=False), weight=Normal(output_std))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        return self.output(F.silu(self.gate(hidden)) * self.inner(hidden))
