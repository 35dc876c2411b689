"""The positions of GLM: learned, of the place in the text, and with 2-D positions of the place within the blank."""

from __future__ import annotations

from torch import Tensor, nn

from ftk.modules.initialization import Normal, declare


class PositionEmbedding(nn.Module):
    """Learned absolute positions.

    Args:
        max_positions: number of rows; positions run from 0 to max_positions - 1.
        hidden_size: H.
        init_std: of the initial rows.
    """

    def __init__(self, max_positions: int, hidden_size: int, init_std: float = 0.02) -> None:
        super().__init__()
        self.position = declare(nn.Embedding(max_positions, hidden_size), weight=Normal(init_std))

    def forward(self, position_ids: Tensor) -> Tensor:
        """position_ids [B, T], or [B, 2, T] of which the second row is left unread -> [B, T, H]"""
        rows = position_ids.reshape(position_ids.size(0), -1, position_ids.size(-1))  # [B, 1 or 2, T]
        return self.position(rows[:, 0])


class BlockPositionEmbedding(nn.Module):
    """Learned 2-D positions: place in the text, and place within the blank (Du et al. 2022, 2.2).

    Args:
        max_positions: both tables have max_positions + 1 rows, as published.
        hidden_size: H.
        init_std: of the initial rows.
    """

    def __init__(self, max_positions: int, hidden_size: int, init_std: float = 0.02) -> None:
        super().__init__()
        self.position = declare(nn.Embedding(max_positions + 1, hidden_size), weight=Normal(init_std))
        self.block = declare(nn.Embedding(max_positions + 1, hidden_size), weight=Normal(init_std))

    def forward(self, position_ids: Tensor) -> Tensor:
        """position_ids [B, 2, T]: in the text, and within the blank (0 in the context) -> [B, T, H]"""
        position, block = position_ids.unbind(1)  # each [B, T]
        return self.position(position) + self.block(block)
