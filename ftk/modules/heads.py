"""Output layers: what makes of hidden states what a criterion scores and a generator chooses from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ftk.modules.embeddings import LogitsBias, TiedEmbedding


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


class BiasedVocabulary(NamedTuple):
    """An output layer and a bias: no single matrix, so that `weight` is None.

    Attributes:
        output: the token embedding, or a matrix of its own.
        bias: added to the logits.
    """

    output: TiedEmbedding | nn.Linear
    bias: LogitsBias

    @property
    def weight(self) -> None:
        """None, see `Head`."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> logits [..., V]"""
        return self.bias(logits_of(self.output, hidden))  # type: ignore[no-any-return]


def logits_of(output: TiedEmbedding | nn.Linear, hidden: Tensor) -> Tensor:
    """Of the token embedding, or of an output layer of its own: hidden [..., H] -> [..., V]"""
    return getattr(output, "logits", output)(hidden)  # type: ignore[no-any-return]


@dataclass(kw_only=True)
class HeadConfig:
    """Options of a head that is put on a model in the place of its output layer (`ftk.modules.classifier`)."""

    head_layer: bool = field(
        default=True, metadata={"help": "a layer of the model's width, with tanh after it, in front of the scores"}
    )
    head_dropout: float = field(default=0.1, metadata={"help": "dropout in front of the scores", "within": "[0, 1)"})


@dataclass(kw_only=True)
class HeadShape(HeadConfig):
    """The same with what the task decides."""

    num_outputs: int = field(metadata={"min": 1, "max": 10**6, "help": "how many scores there are"})
