"""Attention within a window, as a band along the diagonal: no score is made of what is outside of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ftk.errors import UserError
from ftk.modules.attention import Attend, Front
from ftk.modules.masked_attention import fused_attention, sdpa
from ftk.modules.masks import Visibility, marked_places
from ftk.registry import register_attention


class BandedAttention(NamedTuple):
    """An `Attend` of N blocks of C queries, each of which sees the S keys near its block, and G global ones.

    Args:
        mask: bool [B or 1, N, C, S + G], True where a query may see a key.
        behind, ahead: keys of a block that lie before its first query and behind its last one.
        places: int64 [B, G], those of the global keys; None: there are none.
        dropout, front: as in `MaskedAttention`.
    """

    mask: Tensor
    behind: int
    ahead: int
    places: Tensor | None
    dropout: float
    front: Front | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        if bias is not None:
            raise UserError("`attention` banded takes no bias of positions; use `attention` sdpa")
        (_, count, size, _), num_tokens = self.mask.shape, query.size(2)
        more = count * size - num_tokens
        blocks = F.pad(query, (0, 0, 0, more)).unflatten(2, (count, size)).transpose(1, 2).flatten(0, 1)
        keys, values = self._near(key, more), self._near(value, more)  # [B N, K, S + G, D] each
        mask = self.mask.expand(query.size(0), -1, -1, -1).flatten(0, 1)[:, None]  # [B N, 1, C, S + G]
        attended = fused_attention(  # [B N, A, C, D]
            blocks, keys, values, mask, dropout=self.dropout, scale=scale, front=self.front
        )
        return attended.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)[:, :, :num_tokens]

    def _near(self, heads: Tensor, more: int) -> Tensor:
        """Keys or values [B, K, T, D] -> those of each block, and the global ones, [B N, K, S + G, D]"""
        size = self.mask.size(2)
        padded = F.pad(heads, (0, 0, self.behind, more + self.ahead))
        near = padded.unfold(2, size + self.behind + self.ahead, size).permute(0, 2, 1, 4, 3)  # [B, N, K, S, D]
        if self.places is not None:
            places = self.places[:, None, :, None].expand(-1, heads.size(1), -1, heads.size(3))
            far = heads.gather(2, places)[:, None].expand(-1, near.size(1), -1, -1, -1)  # [B, N, K, G, D]
            near = torch.cat((near, far), dim=3)
        return near.flatten(0, 1)


@register_attention("banded")
def banded(
    visibility: Visibility,
    num_tokens: int,
    device: torch.device,
    dropout: float,
    dtype: torch.dtype,
    num_keys: int | None = None,
) -> Attend:
    """Blocks are as long as the window. What has none, counts it by positions or has a prefix is left to `sdpa`."""
    window = visibility.window
    # Of a prefix keys are seen at any distance ahead.
    if window is None or visibility.prefix is not None or visibility.positions is not None or num_keys is not None:
        return sdpa(visibility, num_tokens, device, dropout, dtype, num_keys)
    behind, ahead = window - 1, 0 if visibility.causal else window - 1
    starts = torch.arange(0, num_tokens, window, device=device)[:, None]  # [N, 1]
    queries = (starts + torch.arange(window, device=device)).clamp(max=num_tokens - 1)[None, :, :, None]  # [1, N, C, 1]
    keys = (starts - behind + torch.arange(window + behind + ahead, device=device))[None, :, None]  # [1, N, 1, S]
    batch = torch.arange(visibility.num_rows, device=device)[:, None, None, None]
    inside = (keys >= 0) & (keys < num_tokens)
    mask = visibility.sees(batch, queries, keys.clamp(0, num_tokens - 1)) & inside  # [B or 1, N, C, S]
    places = None
    if visibility.global_keys is not None:
        places = marked_places(visibility.global_keys)
        far = places[:, None, None]  # [B, 1, 1, G]
        # Those in the band are seen there; the others in `places` fill up rows that have fewer.
        apart = (far < keys[..., :1]) | (far > keys[..., -1:])
        seen = visibility.sees(batch, queries, far) & apart & (visibility.global_keys[batch, far] != 0)
        mask = torch.cat((mask, seen), dim=-1)
    # The last token is too far from some padding, and the softmax of a query without a key is NaN.
    return BandedAttention(mask | ~mask.any(-1, keepdim=True), behind, ahead, places, dropout)
