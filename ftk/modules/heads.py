"""Output layers: what makes of hidden states what a criterion scores and a generator chooses from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from ftk.modules.embeddings import TiedEmbedding


class Head(Protocol):
    """An output layer, applied apart from the model's trunk, so that [B, T, V] need never exist.

    `nn.Linear(hidden_size, vocab_size, bias=False)` is one as it is.
    """

    @property
    def weight(self) -> Tensor | None:
        """[V, H] where the head is this matrix alone, so that a criterion may fuse it with the loss; else None."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., V], or another number of scores"""


class TiedVocabulary(NamedTuple):
    """The token embedding as the output layer (Press and Wolf 2017). No module: the matrix has one name, not two."""

    embedding: TiedEmbedding

    @property
    def weight(self) -> Tensor:
        """[V, H]: the matrix of the token embedding."""
        return self.embedding.weight

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> logits [..., V]"""
        return self.embedding.logits(hidden)
