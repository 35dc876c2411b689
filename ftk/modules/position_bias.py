"""Position bias: a number for each head and bucket of distances, added to attention scores (Raffel et al. 2020)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ftk.modules.attention import Attend

_MAX_CACHED_DISTANCES = 1 << 19  # distances of a table that is kept for all steps, 8 MB on either side


class PositionBias(nn.Embedding):
    """A table of buckets and heads.

    Args:
        num_buckets: half of which are for keys behind the query if `bidirectional`.
        num_heads: A.
        max_distance: from which on all distances are in the last bucket.
        bidirectional: whether keys behind the query have buckets of their own; else all share that of distance 0.
        more: rows behind the buckets, for a subclass that gives other `places`.
    """

    def __init__(
        self, num_buckets: int, num_heads: int, max_distance: int, bidirectional: bool, *, more: int = 0
    ) -> None:
        super().__init__(num_buckets + more, num_heads)
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """What is added to the scores.

        Read by name and not by `forward`, so that a rank with some of the heads has their columns of the table.

        Args:
            queries: positions, int64 [B or 1, T].
            keys: positions, int64 [B or 1, S].

        Returns:
            [B or 1, A, T, S]
        """
        return F.embedding(self.places(queries, keys), self.weight).permute(0, 3, 1, 2).contiguous()

    def places(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The row of the table for each query and key: arguments as of `between` -> int64 [B or 1, T, S]"""
        far = self.max_distance
        is_kept = far < _MAX_CACHED_DISTANCES and not torch.compiler.is_compiling()  # a compiled program makes its own
        make = _cached_buckets if is_kept else _buckets
        table = make(self.num_buckets, far, self.bidirectional, keys.device)
        ahead = keys[:, None, :] - queries[:, :, None]  # [B, T, S]
        return table[ahead.clamp_(-far, far).add_(far)]


def _buckets(num_buckets: int, far: int, bidirectional: bool, device: torch.device) -> Tensor:
    """The row of the table for each distance from -far, which is behind the query, to far: int64 [2 far + 1]"""
    half = num_buckets // 2 if bidirectional else num_buckets
    behind = distance_buckets(half, far, device)  # [far + 1]
    ahead = behind[1:] + half if bidirectional else torch.zeros_like(behind[1:])
    return torch.cat((behind.flip(0), ahead))


@lru_cache(maxsize=16)
def _cached_buckets(num_buckets: int, far: int, bidirectional: bool, device: torch.device) -> Tensor:
    """`_buckets`, made once for all steps."""
    with torch.inference_mode(False):  # else training could not use what generation made
        return _buckets(num_buckets, far, bidirectional, device)


def distance_buckets(num_buckets: int, max_distance: int, device: torch.device | None = None) -> Tensor:
    """The bucket of each distance from 0 to max_distance, int64 [max_distance + 1].

    The first half of the buckets has one distance each; the others grow with the logarithm of the distance.
    """
    exact = num_buckets // 2
    distances = torch.arange(max_distance + 1, device=device)
    growth = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (growth * (num_buckets - exact)).to(torch.int64)).clamp(max=num_buckets - 1)
    return torch.where(distances < exact, distances, wide)


class BiasedAttention(NamedTuple):
    """An `Attend` that gives another one its bias and scale of the scores."""

    attend: Attend
    bias: Tensor | None
    scale: float | None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        return self.attend(query, key, value, bias=self.bias, scale=self.scale)
