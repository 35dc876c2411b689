"""Span sampling: draws a sample's objective, and where its text is blanked out for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ftk.data.random import SampleRandom
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples._spans import SpanDrawer

if TYPE_CHECKING:
    from ftk.tokenizers import SpecialTokens

TOKEN, SENTENCE, DOCUMENT = 0, 1, 2


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


class SpanSampler:
    """Draws the blanks of texts.

    Args:
        special: ids of the command tokens.
        config: the objectives' probabilities and lengths.
        sentence_ends: bool [V], true for ids whose text ends a sentence (`documents.sentence_end_ids`).
    """

    def __init__(self, special: SpecialTokens, config: BlankInfillingConfig, sentence_ends: NDArray[np.bool_]) -> None:
        self.kernel = SpanDrawer(
            special.eos,
            special.cls,
            (config.single_span_prob, config.bert_prob, config.gap_sentence_prob, config.gpt_prob),
            (config.bert_ratio, config.gap_sentence_ratio, config.gpt_min_ratio),
            config.gpt_infill_prob,
            poisson_weights(config.avg_block_length, config.max_block_length),
            sentence_ends,
            config.shuffle_blocks,
        )

    def sample(self, tokens: NDArray[np.int64], rng: SampleRandom) -> Blanks:
        """Draws an objective, its spans and the order of their answers.

        Args:
            tokens: int64 [N], documents as [CLS], text, end of document.
            rng: the sample's random stream; it is advanced.
        """
        return Blanks(*self.kernel.sample(tokens, rng))


def poisson_weights(mean: float, longest: int) -> NDArray[np.float64]:
    """Running sums of the Poisson probabilities of the lengths 1 .. longest, float64 [longest]."""
    lengths = range(1, longest + 1)
    logs = [length * math.log(mean) - mean - math.lgamma(length + 1) for length in lengths]
    return np.cumsum(np.exp(logs))
