"""Transformer layers: one class for each place of the norms on the residual path; and a stack of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ftk.modules.attention import Attend, CrossAttend
from ftk.modules.dropout import Dropout, drop_samples


class ResidualLayer(nn.Module):
    """A layer that adds the outputs of its parts to the residual path.

    Args:
        dropout: probability with which a value of an output is dropped before it is added.
        stochastic_depth: probability with which, in training, the whole output is dropped for a sample, and otherwise
            divided by the rest (Huang et al. 2016).
    """

    ADDS_ALONE: ClassVar[bool] = True
    """Whether the residual path holds sums alone, of the embeddings and the outputs of parts, and no norm's result."""

    def __init__(self, dropout: float = 0.0, stochastic_depth: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.stochastic_depth = stochastic_depth

    def add(self, hidden: Tensor, output: Tensor) -> Tensor:
        """hidden [B, T, H] and the output of a part of the layer, [B, T, H] -> [B, T, H]"""
        output = self.dropout(output)
        if self.training and self.stochastic_depth > 0.0:
            output = drop_samples(output, self.stochastic_depth)
        return hidden + output


class TransformerLayer(ResidualLayer):
    """Pre-norm (Radford et al. 2019): a norm before attention and before the feed-forward network, both added.

    Args:
        attention: called as `attention(hidden, attend)`, such as `Attention`.
        feed_forward: hidden [B, T, H] -> [B, T, H].
        norm: makes a norm over H.
        dropout, stochastic_depth: as of `ResidualLayer`.
    """

    NORMS: ClassVar[tuple[str, ...]] = ("attention_norm", "feed_forward_norm")
    """Names of the norms over H."""

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        norm: Callable[[], nn.Module],
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__(dropout, stochastic_depth)
        self.attention_norm = norm()
        self.attention = attention
        self.feed_forward_norm = norm()
        self.feed_forward = feed_forward

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        hidden = self.add(hidden, self.attention(self.attention_norm(hidden), attend))
        return self.add(hidden, self.feed_forward(self.feed_forward_norm(hidden)))


class PostNormLayer(TransformerLayer):
    """Post-norm (Vaswani et al. 2017): each norm after the residual addition.

    A model of such layers needs no final norm.
    """

    ADDS_ALONE = False
    NORMS_BEHIND = True
    """Whether the norms read the sums, which they keep for the backward pass."""

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        hidden = self.attention_norm(self.add(hidden, self.attention(hidden, attend)))
        return self.feed_forward_norm(self.add(hidden, self.feed_forward(hidden)))


class SandwichLayer(TransformerLayer):
    """A norm before and behind attention and the feed-forward network, whose outputs are added (Ding et al. 2021)."""

    ADDS_ALONE = False
    NORMS = (*TransformerLayer.NORMS, "attention_output_norm", "feed_forward_output_norm")

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        norm: Callable[[], nn.Module],
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__(attention, feed_forward, norm, dropout, stochastic_depth)
        self.attention_output_norm = norm()
        self.feed_forward_output_norm = norm()

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        attended = self.attention(self.attention_norm(hidden), attend)
        hidden = self.add(hidden, self.attention_output_norm(attended))
        return self.add(hidden, self.feed_forward_output_norm(self.feed_forward(self.feed_forward_norm(hidden))))


class DeepNormLayer(TransformerLayer):
    """DeepNorm (Wang et al. 2022): the residual path carries what the norms give, scaled: a n(x) + f(n(x)).

    It is DeepNet's n(a x + f(x)) with each norm counted to the part behind it; so a model of such layers has a norm in
    front of the first layer, and needs a final norm.

    Attributes:
        scale: a; sqrt(2 L) in L layers.
    """

    ADDS_ALONE = False
    scale: float = 1.0

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        normal = self.attention_norm(hidden)
        normal = self.feed_forward_norm(self.add(self.scale * normal, self.attention(normal, attend)))
        return self.add(self.scale * normal, self.feed_forward(normal))


class DecoderLayer(TransformerLayer):
    """A pre-norm layer behind an encoder: attention, attention to the encoder's states, feed-forward network.

    Args:
        attention, feed_forward, norm, dropout, stochastic_depth: as of `TransformerLayer`.
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
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__(attention, feed_forward, norm, dropout, stochastic_depth)
        self.cross_attention_norm = norm()
        self.cross_attention = cross_attention

    def forward(self, hidden: Tensor, attend: CrossAttend) -> Tensor:  # type: ignore[override]
        """hidden [B, T, H] -> [B, T, H]"""
        hidden = self.add(hidden, self.attention(self.attention_norm(hidden), attend.self_attend))
        read = self.cross_attention(self.cross_attention_norm(hidden), attend.cross_attend, attend.memory)
        hidden = self.add(hidden, read)
        return self.add(hidden, self.feed_forward(self.feed_forward_norm(hidden)))


class PostNormDecoderLayer(DecoderLayer):
    """The same with each norm after the residual addition (Vaswani et al. 2017)."""

    ADDS_ALONE = False

    def forward(self, hidden: Tensor, attend: CrossAttend) -> Tensor:  # type: ignore[override]
        """hidden [B, T, H] -> [B, T, H]"""
        hidden = self.attention_norm(self.add(hidden, self.attention(hidden, attend.self_attend)))
        read = self.cross_attention(hidden, attend.cross_attend, attend.memory)
        hidden = self.cross_attention_norm(self.add(hidden, read))
        return self.feed_forward_norm(self.add(hidden, self.feed_forward(hidden)))


class ParallelLayer(ResidualLayer):
    """Parallel residual (Wang and Komatsuzaki 2021): attention and feed-forward network read the same norm, both added.

    Args:
        attention, feed_forward, norm, dropout, stochastic_depth: as of `TransformerLayer`.
    """

    NORMS: ClassVar[tuple[str, ...]] = ("norm",)

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        norm: Callable[[], nn.Module],
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__(dropout, stochastic_depth)
        self.norm = norm()
        self.attention = attention
        self.feed_forward = feed_forward

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        normal = self.norm(hidden)
        return self.add(self.add(hidden, self.attention(normal, attend)), self.feed_forward(normal))


def run_layers(layers: Iterable[nn.Module], hidden: Tensor, attend: Attend, layer_drop: float = 0.0) -> Tensor:
    """Layers one after the other; with LayerDrop (Fan et al. 2019) each is skipped with a probability.

    A skipped layer is computed, too, and its gradients are 0: so there is no question to the host, and ranks with
    other batches, which skip other layers, run the same collectives. Numbers are drawn from torch's default generator,
    which tensor parallel ranks have in common.

    Args:
        layers: called as `layer(hidden, attend)`.
        hidden: [B, T, H].
        attend: of all layers.
        layer_drop: the probability; 0 outside training.

    Returns:
        hidden [B, T, H]
    """
    if layer_drop == 0.0:
        for layer in layers:
            hidden = layer(hidden, attend)
        return hidden
    for layer in layers:
        skipped = torch.rand((), device=hidden.device) < layer_drop
        hidden = torch.where(skipped, hidden, layer(hidden, attend))
    return hidden
