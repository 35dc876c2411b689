"""Token embedding tied to the output layer, and learned positions in one or two dimensions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ftk.modules.linear import linear


class TiedEmbedding(nn.Embedding):
    """A token embedding [V, H] whose matrix is the output layer too (Press and Wolf 2017).

    On a CPU the gradient of the looked-up rows is added to that of the output layer, instead of being spread over
    a second [V, H] first: at V 30592 and H 512 that is 63 MB less and up to 3 % of a step.

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
        return linear(hidden, self.weight)


class PositionEmbedding(nn.Module):
    """Learned absolute positions.

    Args:
        max_positions: number of rows; positions run from 0 to max_positions - 1.
        hidden_size: H.
    """

    def __init__(self, max_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.position = nn.Embedding(max_positions, hidden_size)

    def forward(self, position_ids: Tensor) -> Tensor:
        """position_ids [B, T], or [B, 2, T] of which the second row is left unread -> [B, T, H]"""
        rows = position_ids.reshape(position_ids.size(0), -1, position_ids.size(-1))  # [B, 1 or 2, T]
        return self.position(rows[:, 0])


class BlockPositionEmbedding(nn.Module):
    """Learned 2-D positions: place in the text, and place within the blank (Du et al. 2022, 2.2).

    Args:
        max_positions: both tables have max_positions + 1 rows, as published.
        hidden_size: H.
    """

    def __init__(self, max_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.position = nn.Embedding(max_positions + 1, hidden_size)
        self.block = nn.Embedding(max_positions + 1, hidden_size)

    def forward(self, position_ids: Tensor) -> Tensor:
        """position_ids [B, 2, T]: in the text, and within the blank (0 in the context) -> [B, T, H]"""
        position, block = position_ids.unbind(1)  # each [B, T]
        return self.position(position) + self.block(block)


def _make_gradient_dense(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()


def plain_positions(tokens: Tensor) -> Tensor:
    """[B, 2, T] for tokens [B, T] that have no blanks: 0, 1, ... T - 1 in the text, 0 within a blank."""
    position = torch.arange(tokens.size(1), device=tokens.device)
    return torch.stack((position, torch.zeros_like(position))).expand(tokens.size(0), -1, -1)
