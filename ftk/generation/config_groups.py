"""The options of generation by subject, each group with its meanings, units and limits; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ftk.config.options import option

FILTERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
"""Options of `SamplingConfig` that change the distribution which is drawn from."""

MOST_TOKENS = 1_000_000
"""Of an answer. As that of hypotheses, beyond any use, and before memory for them is asked for."""

MOST_ANSWERS = 10_000
"""Hypotheses, samples or candidates at once for one answer."""

_WEIGHTS = "[0, 1e6]"  # of a log-probability: sums of such products stay far below what a float32 holds


@dataclass(kw_only=True)
class AnswerConfig:
    """What an answer is, and how many are given."""

    group_title: ClassVar[str] = "answers"

    max_len: int = option(24, "longest answer", daily=True, unit="tokens", min=1, max=MOST_TOKENS)
    min_len: int = option(0, "shortest answer; no end before", unit="tokens", min=0)
    length_penalty: float = option(
        1.0, "score = sum of log-probabilities / length ** this, -10 to 10; above 1 favours long answers"
    )
    nbest: int = option(
        1, "answers in each place; without sampling at most as many as beams", daily=True, min=1, max=MOST_ANSWERS
    )
    alternatives: int = option(
        0, "give this many likeliest tokens of the model for each token of an answer", unit="tokens", min=0
    )

    def validate(self) -> Iterator[str]:
        if self.min_len > self.max_len:
            yield f"min_len is {self.min_len}; it must be from 0 to max_len {self.max_len}"
        greatest = self._greatest_length_penalty()
        if not abs(self.length_penalty) <= greatest:
            yield f"length_penalty is {self.length_penalty}; it must be from -{greatest} to {greatest}"

    def _greatest_length_penalty(self) -> int:
        """10 for answers, given ones too, of up to a thousand tokens: a float32 holds length ** this, and 1 / it."""
        return math.floor(30.0 / math.log10(min(max(self.max_len, 1000), MOST_TOKENS)))


@dataclass(kw_only=True)
class BeamConfig:
    """How many hypotheses continue together, and when they are finished."""

    group_title: ClassVar[str] = "beam search"

    beam: int = option(1, "hypotheses kept per prompt; 1 is greedy decoding", daily=True, min=1, max=MOST_ANSWERS)
    early_stopping: str = option(
        "true",
        "beams: a prompt is finished when it has `beam` answers (true), when moreover no hypothesis is "
        "better at its present length (false), or could become so at any length (never)",
        choices=("true", "false", "never"),
    )
    diverse_groups: int = option(
        2, "diverse_beam: number of groups that the beam is divided into", unit="groups", min=1, max=MOST_ANSWERS
    )
    diversity_strength: float = option(
        0.5, "diverse_beam: taken off a token's score for each earlier group that has just chosen it", within=_WEIGHTS
    )

    def __post_init__(self) -> None:
        if isinstance(self.early_stopping, bool):  # as YAML and Python write it
            self.early_stopping = str(self.early_stopping).lower()


@dataclass(kw_only=True)
class SamplingConfig:
    """Which distribution is drawn from, and with which random numbers."""

    group_title: ClassVar[str] = "sampling (what is asked for is done in this order)"

    sampling: bool = option(False, "draw tokens at random instead of searching", daily=True)
    temperature: float = option(1.0, "sampling: divides the logits; above 0", daily=True, max=1e308)
    top_k: int = option(0, "sampling: draw among the N likeliest tokens; 0: all", daily=True, unit="tokens", min=0)
    top_p: float = option(1.0, "sampling: draw among the fewest tokens that hold this share", "(0, 1]", daily=True)
    min_p: float = option(
        0.0, "sampling: draw among the tokens with at least this share of the likeliest one's", "[0, 1]"
    )
    typical_p: float = option(
        1.0, "sampling: draw among the tokens of nearly expected information that hold this share", "(0, 1]"
    )
    seed: int = option(1, "sampling: prompt and seed alone decide the answer", daily=True, max=2**63 - 1)

    def filters(self) -> dict[str, Any]:
        """What is done to the distribution that is drawn from: arguments of `token_probabilities`."""
        return {name: getattr(self, name) for name in FILTERS}

    def validate(self) -> Iterator[str]:
        if not 0.0 < self.temperature < math.inf:
            yield f"temperature is {self.temperature}; it must be above 0 and finite (for the likeliest: greedy)"


@dataclass(kw_only=True)
class LanguageModelConfig:
    """A language model whose log-probabilities are added (shallow fusion)."""

    group_title: ClassVar[str] = "language model"

    lm_path: str | None = option(
        None,
        "checkpoint, run, or several with colons between, with the same tokenizer: reads the text left of "
        "an answer and the answer so far; its log-probabilities are added to the model's",
        metavar="PATH",
    )
    lm_weight: float = option(
        0.2, "what `lm_path` counts: score = log p + this * log p of the language model", _WEIGHTS
    )
    lm_ends: bool = option(True, "the language model of `lm_path` scores end tokens, too; off: only the other tokens")

    def validate(self) -> Iterator[str]:
        if self.lm_path is None and self.lm_weight != type(self).__dataclass_fields__["lm_weight"].default:
            yield f"lm_weight is {self.lm_weight}, but there is no language model; name one by `lm_path`"
        if self.lm_path is None and not self.lm_ends:
            yield "lm_ends is off, but there is no language model; name one by `lm_path`"


@dataclass(kw_only=True)
class BatchConfig:
    """How many prompts are answered at once: speed and memory; in fp32 no answer depends on it.

    Rounded weights (bf16, int8, int4) are multiplied in other ways in small batches and in large ones, so that an
    answer may differ where two tokens are as good as equally likely.
    """

    group_title: ClassVar[str] = "batches"

    batch_size: int = option(
        16,
        "prompts that are answered at once; in fp32 no answer depends on it",
        daily=True,
        unit="prompts",
        min=1,
        max=MOST_TOKENS,
    )
