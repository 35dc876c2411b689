"""Samples of GLM pretraining: packs documents, draws blanks, lays out the arrays."""

from __future__ import annotations

import copy
import logging
import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ftk.data.batches.collate import SampleBatch
from ftk.data.corpora.documents import DocumentPacker, Documents, sentence_end_ids
from ftk.data.corpora.split import DocumentSubset
from ftk.data.sample_dataset import BatchedDataset, check_indices, shortened_length
from ftk.errors import UserError
from ftk.tasks.glm_blank.command_tokens import sentinels
from ftk.tasks.glm_blank.config import BlankInfillingConfig, max_blanks, max_sample_length
from ftk.tasks.glm_blank.samples._samples import SampleMaker
from ftk.tasks.glm_blank.samples.infilling import OBJECTIVES, Sample, command_ids
from ftk.tasks.glm_blank.samples.spans import Blanks, span_drawer

if TYPE_CHECKING:
    from ftk.tokenizers import Tokenizer

logger = logging.getLogger(__name__)


class GLMBlankDataset(BatchedDataset):
    """GLM samples of a corpus; each is a pure function of (seed, epoch, index).

    An epoch has as many samples as make up the corpus's tokens; which documents they hold is drawn at random.

    Args:
        tokenizer: of the corpus; gives the command tokens, and which ids end a sentence.
        quiet: do not log the number of long documents.

    Raises:
        UserError: the data has no tokens, or the tokenizer lacks command tokens that the options need.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        config: BlankInfillingConfig,
        seed: int,
        *,
        quiet: bool = False,
    ) -> None:
        check_command_tokens(tokenizer, config)
        self.special = tokenizer.special
        self.config = config
        self.seed = seed
        sentence_ends = sentence_end_ids(tokenizer)
        self.texts = without_long_documents(documents, config, quiet=quiet)
        self.packer = DocumentPacker(
            self.texts,
            self.special,
            sentence_ends,
            seq_length=config.seq_length,
            short_seq_prob=config.short_seq_prob,
            non_sentence_start=config.non_sentence_start,
            one_document=config.sample_one_document,
        )
        self.sentinels = sentinels(self.special) if config.sentinel_tokens else ()
        self._longest = config.seq_length  # tokens of a text; fewer in a curriculum
        self._length = max(1, math.ceil(self.packer.total_tokens / config.seq_length))
        self._maker = self._build_maker(sentence_ends)

    def __len__(self) -> int:
        return self._length

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """The most tokens that each sample of an epoch can have, int32 [len]."""
        config = self.config
        if not config.sample_one_document:
            return np.full(len(self), max_sample_length(config), dtype=np.int32)
        first = self.packer.first_document_sizes(self.seed, epoch, np.arange(len(self)))
        text = np.minimum(first + 2, config.seq_length)  # [len]
        blanks = np.ones(len(self), dtype=np.int64)
        for probability, ratio in (
            (config.bert_prob, config.bert_ratio),
            (config.gap_sentence_prob, config.gap_sentence_ratio),
        ):
            if probability > 0.0:
                blanks = np.maximum(blanks, (ratio * text).astype(np.int64))
        return (text + 2 * blanks).astype(np.int32)

    def shortened(self, share: float) -> GLMBlankDataset | None:
        """Samples of texts that are packed to a share of `seq_length`; None where each holds one document."""
        if self.config.sample_one_document:
            return None
        made = copy.copy(self)
        made._longest = shortened_length(self.config.seq_length, share)
        return made

    def samples(self, epoch: int, indices: NDArray[np.integer]) -> SampleBatch:
        """Several samples in one call, already padded to the longest of them.

        Args:
            indices: integers [B].

        Returns:
            tokens, targets: int64 [T]; loss_mask: bool [T]; position_ids: int64 [2, T]; context_length and
            objective: int64 []; with a document mask document_ids: int64 [T].
        """
        check_indices(indices, len(self))
        return SampleBatch(*self._maker.samples(self.seed, epoch, indices, self._longest))

    def explain(self, epoch: int, index: int) -> tuple[NDArray[np.int64], Blanks, Sample]:
        """One sample with what it was made of: the packed text, int64 [N], and its blanks."""
        check_indices(np.array([index]), len(self))
        text, spans, answer_order, append_end, arrays, lengths = self._maker.explain(self.seed, epoch, index)
        made = SampleBatch(arrays, lengths)[0]
        made["context_length"], made["objective"] = int(made["context_length"]), int(made["objective"])
        return text, Blanks(made["objective"], spans, answer_order, append_end), Sample(**made)

    def _build_maker(self, sentence_ends: NDArray[np.bool_]) -> SampleMaker:
        config, special = self.config, self.special
        most = max_blanks(config)
        commands = [command_ids(most, objective, special, self.sentinels) for objective in range(len(OBJECTIVES))]
        return SampleMaker(
            self.packer.kernel,
            span_drawer(special, config, sentence_ends),
            most,
            np.stack([masks for masks, _ in commands]),
            commands[0][1],
            tuple(
                0 if token is None else token
                for token in (special.pad, special.eos, special.cls, special.eop, special.dblock)
            ),
            config.block_positions,
            config.gmask_runs_on,
            config.document_mask,
            config.seq_length if config.sentinel_tokens else -1,
            config.seq_length if config.random_position else -1,
            config.block_mask_prob,
            config.context_mask_ratio,
            config.context_mask_range,
        )


def without_long_documents(documents: Documents, config: BlankInfillingConfig, *, quiet: bool) -> Documents:
    """The documents; with `long_documents` drop, without those that no sample holds whole. Logs the number of these.

    Raises:
        UserError: all of them are.
    """
    if config.long_documents == "cut" and not config.sample_one_document:
        return documents  # in packed texts any document may be cut
    room = config.seq_length - 2  # [CLS] and end of document
    fits = np.asarray(documents.sizes) <= room  # [D]
    long = len(fits) - int(fits.sum())
    if not long:
        return documents
    what = (
        f"{long} of {len(fits)} documents have more than the {room} tokens that `seq_length` {config.seq_length} holds"
    )
    level = logging.DEBUG if quiet else logging.INFO
    if config.long_documents == "cut":
        logger.log(level, "%s; a sample gets a part of one (`long_documents` drop leaves them out)", what)
        return documents
    if long == len(fits):
        raise UserError(f"{what}, and `long_documents` drop leaves nothing; raise `seq_length` or cut them")
    logger.log(level, "%s and are dropped", what)
    return DocumentSubset(documents, np.flatnonzero(fits))


def check_command_tokens(tokenizer: Tokenizer, config: BlankInfillingConfig) -> None:
    """Raises UserError if the tokenizer lacks a command token that the objective needs."""
    special = tokenizer.special
    missing = [name for name in ("cls", "mask", "sop", "eop") if getattr(special, name) is None]
    if missing:
        way_out = "preprocess with `special_tokens` plain, or glm and `block_symbols`"
        if tokenizer.special_tokens is None:  # it takes no layout
            way_out = "preprocess with another `tokenizer`, such as sentencepiece, or train another model, e.g. gpt2"
        lacking = f"the tokenizer {tokenizer.name} has no {', '.join(missing)}"
        raise UserError(f"{lacking}, which blank infilling needs; {way_out}")
    masking = [name for name in ("block_mask_prob", "context_mask_ratio") if getattr(config, name) > 0.0]
    if masking and special.dblock is None:
        given = " and ".join(f"`{name}` {getattr(config, name)}" for name in masking)
        off = " ".join(f"`{name}` 0" for name in masking)
        raise UserError(
            f"{given} (perhaps set by `config`): the tokenizer {tokenizer.name} lacks the command token [dBLOCK]; "
            f"switch it off with {off}, or preprocess with `special_tokens` glm and `decoder_mask`"
        )
    numbered = max_blanks(config) - 1
    if config.sentinel_tokens and len(sentinels(special)) < numbered:
        raise UserError(
            f"`sentinel_tokens` needs {numbered} numbered masks for `seq_length` {config.seq_length}; "
            f"the tokenizer {tokenizer.name} has {len(sentinels(special))}"
        )
