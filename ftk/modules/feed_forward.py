"""The position-wise feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from ftk.modules.dropout import Dropout
from ftk.modules.initialization import Normal, declare

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # GPT-2's; up to 5e-4 from the exact one
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """Two linear layers with an activation in between.

    Args:
        hidden_size: H.
        inner_size: width between the two layers.
        activation: one of `ACTIVATIONS`.
        bias: of both layers.
        dropout: probability with which a value in between is dropped.
        init_std, output_std: of the initial weights of the first and the second layer.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        *,
        activation: str = "gelu_tanh",
        bias: bool = True,
        dropout: float = 0.0,
        init_std: float = 0.02,
        output_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.dropout = Dropout(dropout)
        self.inner = declare(nn.Linear(hidden_size, inner_size, bias=bias), weight=Normal(init_std))
        self.output = declare(nn.Linear(inner_size, hidden_size, bias=bias), weight=Normal(output_std))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        return self.output(self.dropout(self.activation(self.inner(hidden))))


class GatedFeedForward(nn.Module):
    """A linear layer times another that is activated, and one behind (Shazeer 2020): output(act(gate(x)) * inner(x)).

    Args:
        hidden_size: H.
        inner_size: width in between.
        activation: one of `ACTIVATIONS`.
        bias: of the three layers.
        dropout: probability with which a value in between is dropped.
        init_std, output_std: of the initial weights of the first two layers and of the last.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        dropout: float = 0.0,
        init_std: float = 0.02,
        output_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.dropout = Dropout(dropout)
        self.gate = declare(nn.Linear(hidden_size, inner_size, bias=bias), weight=Normal(init_std))
        self.inner = declare(nn.Linear(hidden_size, inner_size, bias=bias), weight=Normal(init_std))
        self.output = declare(nn.Linear(inner_size, hidden_size, bias=bias), weight=Normal(output_std))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        return self.output(self.dropout(self.activation(self.gate(hidden)) * self.inner(hidden)))
