"""Samples of GLM pretraining: packs documents, draws blanks, lays out the arrays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ftk.data._blank_infilling import build_arrays, hide_answer_inputs, hide_context_inputs
from ftk.data.blank_config import BlankInfillingConfig, max_sample_length
from ftk.data.blank_infilling import Sample, command_ids
from ftk.data.documents import DocumentPacker, Documents, sentence_end_ids
from ftk.data.random import SampleRandom
from ftk.data.spans import TOKEN, Blanks, SpanSampler
from ftk.errors import UserError

if TYPE_CHECKING:
    from ftk.tokenizers import Tokenizer


class GLMBlankDataset:
    """GLM samples of a corpus; each is a pure function of (seed, epoch, index).

    An epoch has as many samples as make up the corpus's tokens; which documents they hold is drawn at random.

    Args:
        documents: the corpus, with `.sizes`.
        tokenizer: of the corpus; gives the command tokens, and which ids end a sentence.
        config: the objective's options.
        seed: of all random choices.

    Raises:
        UserError: the data has no tokens, or the tokenizer lacks command tokens that the options need.
    """

    def __init__(self, documents: Documents, tokenizer: Tokenizer, config: BlankInfillingConfig, seed: int) -> None:
        check_command_tokens(tokenizer, config)
        self.special = tokenizer.special
        self.config = config
        self.seed = seed
        sentence_ends = sentence_end_ids(tokenizer)
        self.packer = DocumentPacker(documents, self.special, config, sentence_ends)
        self.sampler = SpanSampler(self.special, config, sentence_ends)
        self.sentinels = self.special.sentinels if config.sentinel_tokens else ()
        self._length = max(1, math.ceil(self.packer.total_tokens / config.seq_length))

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

    def sample(self, epoch: int, index: int) -> dict[str, NDArray]:
        """One sample as arrays.

        Returns:
            tokens, targets: int64 [T]; loss_mask: bool [T]; position_ids: int64 [2, T]; context_length and
            objective: int64 [].
        """
        _, _, made = self.explain(epoch, index)
        return {
            "tokens": made.tokens,
            "targets": made.targets,
            "loss_mask": made.loss_mask,
            "position_ids": made.position_ids,
            "context_length": np.asarray(made.context_length, dtype=np.int64),
            "objective": np.asarray(made.objective, dtype=np.int64),
        }

    def explain(self, epoch: int, index: int) -> tuple[NDArray[np.int64], Blanks, Sample]:
        """One sample with what it was made of: the packed text, int64 [N], and its blanks."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        rng = SampleRandom(self.seed, epoch, index)
        text = self.packer.pack(rng)
        blanks = self.sampler.sample(text, rng)
        return text, blanks, self._fill(text, blanks, rng)

    def _fill(self, text: NDArray[np.int64], blanks: Blanks, rng: SampleRandom) -> Sample:
        config, special = self.config, self.special
        spans, answer_order = blanks.spans, blanks.answer_order
        assert special.eop is not None
        masks, starts = command_ids(len(spans), blanks.objective, special, self.sentinels)
        tokens, targets, loss_mask, position_ids, context_length = build_arrays(
            text,
            spans,
            answer_order,
            masks,
            starts,
            special.eop,
            config.block_positions,
            blanks.append_end,
            self._draw_offset(text, spans, rng),
            config.seq_length if config.sentinel_tokens else -1,
        )
        if blanks.objective == TOKEN and config.needs_decoder_mask:
            assert special.dblock is not None
            assert special.cls is not None
            if config.block_mask_prob > 0.0:
                hide_answer_inputs(
                    tokens, context_length, spans, answer_order, special.dblock, config.block_mask_prob, rng
                )
            if config.context_mask_ratio > 0.0:
                hide_context_inputs(
                    tokens,
                    context_length,
                    spans,
                    config.context_mask_range,
                    int(config.context_mask_ratio * len(text)),
                    special.cls,
                    special.eos,
                    special.dblock,
                    rng,
                )
        return Sample(tokens, targets, loss_mask, position_ids, context_length, blanks.objective)

    def _draw_offset(self, text: NDArray[np.int64], spans: NDArray[np.int64], rng: SampleRandom) -> int:
        """The place of the first token: 0, or with random positions any that keeps the context in seq_length."""
        if not self.config.random_position:
            return 0
        context_length = len(text) - int((spans[:, 1] - spans[:, 0]).sum()) + len(spans)
        return rng.below(max(1, self.config.seq_length - context_length + 1))


def check_command_tokens(tokenizer: Tokenizer, config: BlankInfillingConfig) -> None:
    """Raises UserError if the tokenizer lacks a command token that the objective needs."""
    special = tokenizer.special
    missing = [name for name in ("cls", "mask", "sop", "eop") if getattr(special, name) is None]
    if missing:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no {', '.join(missing)}, which blank infilling needs; "
            f"preprocess with --block-symbols"
        )
    if config.needs_decoder_mask and special.dblock is None:
        raise UserError(
            "--block-mask-prob and --context-mask-ratio need the command token [dBLOCK]; preprocess with --decoder-mask"
        )
    numbered = (max_sample_length(config) - config.seq_length) // 2 - 1
    if config.sentinel_tokens and len(special.sentinels) < numbered:
        raise UserError(
            f"--sentinel-tokens needs {numbered} numbered masks for --seq-length {config.seq_length}; "
            f"the tokenizer {tokenizer.name} has {len(special.sentinels)}"
        )
