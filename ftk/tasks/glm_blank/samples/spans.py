"""Span sampling: draws a sample's objective, and where its text is blanked out for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples._spans import SpanDrawer

if TYPE_CHECKING:
    from ftk.tokenizers import SpecialTokens


@dataclass(frozen=True)
class Blanks:
    """What is taken from a text.

    Args:
        objective: 0 token, 1 sentence, 2 document.
        spans: int64 [K, 2], half-open, sorted.
        answer_order: int64 [K], the number of the span that is answered first, second, ...
        append_end: whether an end token follows each answer (not where the end of a document is generated).
    """

    objective: int
    spans: NDArray[np.int64]
    answer_order: NDArray[np.int64]
    append_end: bool


def span_drawer(special: SpecialTokens, config: BlankInfillingConfig, sentence_ends: NDArray[np.bool_]) -> SpanDrawer:
    """What draws the blanks of texts.

    Args:
        config: the objectives' probabilities and lengths.
        sentence_ends: bool [V], true for ids whose text ends a sentence (`documents.sentence_end_ids`).
    """
    return SpanDrawer(
        special.eos,
        special.cls,
        (config.single_span_prob, config.bert_prob, config.gap_sentence_prob, config.gpt_prob),
        (config.bert_ratio, config.gap_sentence_ratio, config.gpt_min_ratio),
        config.gpt_infill_prob,
        poisson_weights(config.avg_block_length, config.max_block_length),
        sentence_ends,
        config.shuffle_blocks,
    )


def poisson_weights(mean: float, longest: int) -> NDArray[np.float64]:
    """Running sums of the Poisson probabilities of the lengths 1 .. longest, float64 [longest]."""
    lengths = range(1, longest + 1)
    logs = [length * math.log(mean) - mean - math.lgamma(length + 1) for length in lengths]
    return np.cumsum(np.exp(logs))
