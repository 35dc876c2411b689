"""The token embedding that is the output layer too; tables and waves of positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TiedEmbedding(nn.Embedding):
    """A token embedding [V, H] whose matrix is the output layer too (Press and Wolf 2017).

    On a CPU the gradient of the looked-up rows is added to that of the output layer, without a second [V, H].

    Attributes:
        sparse_gradient: whether the rows' gradient may be sparse until then; off where processes sum gradients.
    """

    sparse_gradient = True

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> [..., H]"""
        weight = self.weight
        plain = weight.device.type == "cpu" and type(weight.data) is Tensor and not torch.compiler.is_compiling()
        plain = plain and weight.is_leaf  # what stands in for a parameter, as a part of one, has no gradient of its own
        rows_only = plain and self.sparse_gradient and weight.requires_grad and torch.is_grad_enabled()
        # Where the output layer was not used, or not yet, nothing else makes the gradient dense.
        if rows_only and _make_gradient_dense not in (weight._post_accumulate_grad_hooks or {}).values():
            weight.register_post_accumulate_grad_hook(_make_gradient_dense)
        return F.embedding(tokens, weight, sparse=rows_only)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., V]; there is no bias."""
        return F.linear(hidden, self.weight)


class LogitsBias(nn.Module):
    """A number for each token that is added to its logit, behind a `TiedEmbedding` or another output layer.

    Args:
        vocab_size: V.
        trained: whether it is a parameter; else a buffer.
    """

    bias: Tensor

    def __init__(self, vocab_size: int, *, trained: bool) -> None:
        super().__init__()
        bias = torch.zeros(vocab_size)
        if trained:
            self.bias = nn.Parameter(bias)
        else:
            self.register_buffer("bias", bias)

    def forward(self, logits: Tensor) -> Tensor:
        """logits [..., V] -> [..., V]"""
        return logits + self.bias


class PositionEmbedding(nn.Embedding):
    """A table of positions of which the first stands behind other rows.

    Args:
        num_positions: how many there are.
        hidden_size: H.
        first_row: rows in front of them; fairseq's were for padding, and published files have them.
    """

    def __init__(self, num_positions: int, hidden_size: int, first_row: int) -> None:
        super().__init__(num_positions + first_row, hidden_size)
        self.first_row = first_row

    def forward(self, position_ids: Tensor) -> Tensor:
        """position_ids [B, T] -> [B, T, H]"""
        return super().forward(position_ids + self.first_row)


def sinusoids(position_ids: Tensor, hidden_size: int) -> Tensor:
    """Waves of positions (Vaswani et al. 2017, 3.5), sines before cosines, as tensor2tensor and fairseq have them.

    Args:
        position_ids: [B, T].
        hidden_size: H; where it is odd, the last number is 0.

    Returns:
        float32 [B, T, H]
    """
    half = hidden_size // 2
    places = torch.arange(half, dtype=torch.float32, device=position_ids.device)
    frequencies = torch.exp(places * -(math.log(10000.0) / (half - 1)))
    angles = position_ids[..., None].float() * frequencies  # [B, T, H/2]
    waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
    return F.pad(waves, (0, 1)) if hidden_size % 2 else waves


class PositionWaves(nn.Module):
    """`sinusoids` as a module, for the plan of a model.

    Args:
        hidden_size: H.
        first_position: added to each position.
    """

    def __init__(self, hidden_size: int, first_position: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.first_position = first_position

    def forward(self, position_ids: Tensor) -> Tensor:
        """position_ids [B, T] -> float32 [B, T, H]"""
        return sinusoids(position_ids + self.first_position, self.hidden_size)


def _make_gradient_dense(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
