"""What a language model offers to criterions, generators and scorers: the protocol, not a base class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class LanguageModel(Protocol):
    """A model whose output layer can be applied apart from its trunk, so that [B, T, V] need never exist.

    One whose output layer is a matrix alone also offers it as `output_weight` [V, H]: logits(hidden) is then
    hidden @ output_weight.T, and the criterion may fuse it with the loss. One that can keep packed
    documents apart (--document-mask) also takes `document_ids` [B, T] int64. One whose layers processes may share
    (--tensor-parallel-size) offers `tensor_parallel_plan`, see `ftk.model_parallel.tensor_parallel.plan`.
    """

    def __call__(
        self, tokens: Tensor, *, position_ids: Tensor | None = None, context_length: Tensor | None = None
    ) -> Tensor:
        """tokens [B, T], position_ids [B, 2, T], context_length [B], all int64 -> logits [B, T, V]"""

    def hidden_states(
        self, tokens: Tensor, *, position_ids: Tensor | None = None, context_length: Tensor | None = None
    ) -> Tensor:
        """The same arguments -> what the output layer reads, [B, T, H]"""

    def logits(self, hidden: Tensor) -> Tensor:
        """The output layer: hidden [..., H] -> [..., V]"""


@runtime_checkable
class CountsFlops(Protocol):
    """A model that knows its matrix products. One that does not is trained without FLOP/s and MFU in its records."""

    def training_flops(self, num_tokens: int, num_targets: int, num_pairs: int) -> int:
        """Floating-point operations of the products of a forward and a backward pass.

        Args:
            num_tokens: tokens, padding included.
            num_targets: positions with logits.
            num_pairs: query-key pairs: the sum over sequences of their padded length squared.
        """
