"""Options and samples of causal language modeling: documents, each with an end token, cut into pieces of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ftk.config.options import option
from ftk.data.batches.collate import SampleBatch
from ftk.data.corpora.documents import Documents
from ftk.data.corpora.ring import TokenRing
from ftk.data.sample_dataset import BatchedDataset
from ftk.tasks.language_model import seq_length_option, vocabulary_divisor


@dataclass(kw_only=True)
class CausalLMConfig:
    seq_length: int = seq_length_option(1024, "length of a sample, end tokens counted", min=1)
    document_mask: bool = option(False, "tokens see only their own document, not those packed before it")
    restart_positions: bool = option(False, "positions count from 0 in each document")
    end_loss: bool = option(True, "learn where documents end")
    make_vocab_size_divisible_by: int = vocabulary_divisor()


class CausalDataset(BatchedDataset):
    """Pieces of `seq_length` tokens of a corpus, each a pure function of (seed, epoch, index).

    In an epoch each token is a target once.

    Args:
        vocab_size: V. Other ids than 0 .. V - 1 in a document are an error.
        end: the token that closes a document.
        prefix: tokens that stand in front of each document, as of a prompt.
        seed: of where an epoch begins.

    Raises:
        UserError: there is no token at all.
    """

    def __init__(
        self,
        documents: Documents,
        vocab_size: int,
        end: int,
        config: CausalLMConfig,
        seed: int,
        prefix: Sequence[int] = (),
    ) -> None:
        self.texts = TokenRing(documents, vocab_size, config.seq_length, end, prefix, seed)
        self.config = config

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """Tokens of each sample, int32 [len]."""
        return self.texts.sizes()

    def samples(self, epoch: int, indices: NDArray[np.integer]) -> SampleBatch:
        """Several samples.

        Returns:
            tokens, targets, position_ids: int64 [T]; loss_mask: bool [T]; document_ids: int64 [T] with a document mask.
        """
        end, config = self.texts.end, self.config
        text, numbers, lengths = self.texts.pieces(epoch, indices, end, more=1)  # [B, T + 1] twice, [B]
        same = numbers[:, 1:] == numbers[:, :-1]  # [B, T]: the next token is of the same document
        places = np.arange(same.shape[1])
        inside = places < lengths[:, None]
        arrays = {
            "tokens": text[:, :-1],
            "targets": text[:, 1:],
            "loss_mask": inside,
            "position_ids": np.broadcast_to(places, inside.shape).copy(),
        }
        if config.restart_positions:
            begins = np.pad(~same[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            arrays["position_ids"] = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        if config.document_mask:
            arrays["document_ids"] = np.where(inside, numbers[:, :-1], -1)
            arrays["loss_mask"] = arrays["loss_mask"] & same
        if not config.end_loss:
            arrays["loss_mask"] = arrays["loss_mask"] & (arrays["targets"] != end)
        return SampleBatch({name: np.ascontiguousarray(array) for name, array in arrays.items()}, lengths)
