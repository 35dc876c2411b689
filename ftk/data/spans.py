"""Span sampling: draws a sample's objective, and where its text is blanked out for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ftk.data._spans import document_span, sentence_spans, token_spans
from ftk.data.blank_config import BlankInfillingConfig
from ftk.data.random import SampleRandom

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
        self.special = special
        self.config = config
        self.sentence_ends = np.ascontiguousarray(sentence_ends, dtype=np.uint8)
        self.length_weights = poisson_weights(config.avg_block_length, config.max_block_length)

    def sample(self, tokens: NDArray[np.int64], rng: SampleRandom) -> Blanks:
        """Draws an objective, its spans and the order of their answers.

        Args:
            tokens: int64 [N], documents as [CLS], text, end of document.
            rng: the sample's random stream; it is advanced.
        """
        config, eos, cls = self.config, self.special.eos, self.special.cls
        objective, single = self.draw_objective(rng)
        append_end = True
        if objective == TOKEN:
            spans = token_spans(tokens, eos, cls, config.bert_ratio, self.length_weights, single, rng)
        elif objective == SENTENCE:
            spans = sentence_spans(tokens, eos, cls, config.gap_sentence_ratio, self.sentence_ends, rng)
        else:
            spans, is_suffix = document_span(tokens, eos, cls, config.gpt_infill_prob, config.gpt_min_ratio, rng)
            append_end = not is_suffix
        answer_order = np.arange(len(spans), dtype=np.int64)
        if config.shuffle_blocks:
            rng.shuffle(answer_order)
        return Blanks(objective, spans, answer_order, append_end)

    def draw_objective(self, rng: SampleRandom) -> tuple[int, bool]:
        """The objective, and whether it is a token objective with a single span."""
        config = self.config
        if rng.uniform() < config.single_span_prob:
            return TOKEN, True
        drawn = rng.uniform()
        if drawn < config.bert_prob:
            return TOKEN, False
        if drawn < config.bert_prob + config.gap_sentence_prob or config.gpt_prob < 1e-9:
            return SENTENCE if config.gap_sentence_prob > 0.0 else TOKEN, False
        return DOCUMENT, False


def poisson_weights(mean: float, longest: int) -> NDArray[np.float64]:
    """Running sums of the Poisson probabilities of the lengths 1 .. longest, float64 [longest]."""
    lengths = range(1, longest + 1)
    logs = [length * math.log(mean) - mean - math.lgamma(length + 1) for length in lengths]
    return np.cumsum(np.exp(logs))
