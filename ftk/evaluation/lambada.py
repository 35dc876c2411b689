"""LAMBADA (Paperno et al. 2016): the last word of a passage, by one of two rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ftk.config.options import option
from ftk.data.supervised.row import Row
from ftk.data.supervised.rows import rows_of
from ftk.evaluation.evaluation import Evaluation
from ftk.evaluation.likelihood import Query, Reading, encode_pair, fitted, log_likelihoods, num_read
from ftk.evaluation.metrics import Group, Metric, Record, share
from ftk.registry import register_evaluation

if TYPE_CHECKING:
    from ftk.generation.text import TextGenerator

ORIGINAL, HARNESS = RULES = ("original", "harness")


@dataclass(kw_only=True)
class LambadaConfig(Reading):
    rule: str = option(
        ORIGINAL,
        "original (Du et al. 2022): the word stands after the last white space, context and word are "
        "encoded each by itself, and the end of the text stands after the place of the answer. harness "
        "(lm-evaluation-harness): the word stands after the last space, and both are encoded as one text",
        choices=RULES,
    )


class LastWord(NamedTuple):
    """A passage and the word at its end.

    Attributes:
        row, number: where it comes from.
        prompt, word: in words.
        context, answer: as ids.
        truncated: whether the passage was cut at its left.
    """

    row: Row
    number: int
    prompt: str
    word: str
    context: Sequence[int]
    answer: Sequence[int]
    truncated: bool


@register_evaluation("lambada", config=LambadaConfig)
class Lambada(Evaluation[LastWord]):
    """A word is right where each of its tokens is the likeliest behind the passage and the tokens before it."""

    config: LambadaConfig

    def questions(self, path: str, generator: TextGenerator[Any], limit: int | None = None) -> list[LastWord]:
        return [self._question(number, row, generator) for number, row in enumerate(rows_of(path, limit))]

    def records(
        self,
        questions: Sequence[LastWord],
        generator: TextGenerator[Any],
        progress: Callable[[int], object] | None = None,
    ) -> list[Record]:
        asked = [Query(question.context, [question.answer]) for question in questions]
        found = log_likelihoods(generator, asked, self.config, closed=self._closed, progress=progress)
        return [
            {
                "idx": question.number,
                "place": question.row.place,
                "prompt": question.prompt,
                "candidates": [
                    {"text": question.word, "tokens": len(question.answer), "logprob": sum(scored.logprobs)}
                ],
                "chosen": generator.tokenizer.decode(scored.likeliest).strip(),
                "label": question.word.strip(),
                "correct": scored.is_greedy,
                "confidence": sum(scored.best) - sum(scored.logprobs),
                "truncated": question.truncated,
                "length": num_read(generator.framing, question.context, self.config.expected, self._closed)
                + len(question.answer),
            }
            for question, (scored,) in zip(questions, found, strict=True)
        ]

    def metrics(self) -> list[Metric]:
        return [share("accuracy"), Metric("perplexity", _logprob_of_label, _perplexity, percent=False)]

    @property
    def _closed(self) -> bool | None:
        return True if self.config.rule == ORIGINAL else None

    def _question(self, number: int, row: Row, generator: TextGenerator[Any]) -> LastWord:
        text, tokenizer = row.text("text"), generator.tokenizer
        if self.config.rule == ORIGINAL:
            last = text.split()[-1]
            prompt, word = text[: text.rindex(last)].strip(), f" {last}"
            context, answer = tokenizer.encode(prompt), tokenizer.encode(word)
        else:
            prompt, _, last = text.rpartition(" ")
            word = f" {last}"
            context, answer = encode_pair(tokenizer, prompt, word, apart=hasattr(generator.model, "encode"))
        if not context or not answer:
            row.refuse("text", "must have at least two words; the last one is predicted from the others")
        kept = fitted(generator.framing, context, len(answer), self.config.expected, self._closed)
        return LastWord(row, number, prompt, word, kept, answer, len(kept) < len(context))


def _logprob_of_label(group: Group) -> list[float]:
    return [sum(record["candidates"][0]["logprob"] for record in group), len(group)]


def _perplexity(sums: np.ndarray) -> float:
    """Of words: exp(- mean log-probability of a word)."""
    return float(np.exp(min(-sums[0] / sums[1], 700.0)))
