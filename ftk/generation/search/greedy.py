"""Greedy search."""

from __future__ import annotations

from torch import Tensor

from ftk.generation.search.independent import IndependentSearch
from ftk.registry import register_search


@register_search("greedy")
class GreedySearch(IndependentSearch):
    """Always the token of the greatest score; of equals the first in the vocabulary."""

    joins = True

    def choose(self, scores: Tensor) -> Tensor:
        return scores.argmax(-1)
