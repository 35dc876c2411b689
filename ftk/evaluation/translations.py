"""Scorers for translations: BLEU (Papineni et al. 2002) and chrF (Popović 2015) as sacrebleu computes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any, ClassVar

from ftk.errors import UserError
from ftk.evaluation.base import Scorer, SumScorer
from ftk.registry import register_scorer


@register_scorer("bleu")
class BLEU(SumScorer):
    """Of the whole corpus, with sacrebleu's usual words (13a). The sums are its counts of n-grams, and lengths."""

    name: ClassVar[str] = "bleu"
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._metric = _metrics(self.name).BLEU(**self.options)

    def measure(self, answer: str, references: Sequence[str]) -> Sequence[float]:
        found = self._metric.corpus_score([answer], [[reference] for reference in references])
        return [*found.counts, *found.totals, found.sys_len, found.ref_len]

    def values(self, sums: Sequence[float]) -> dict[str, float]:
        *counts, sys_len, ref_len = map(round, sums)
        orders, metric = len(counts) // 2, self._metric
        found = metric.compute_bleu(
            counts[:orders],
            counts[orders:],
            sys_len,
            ref_len,
            metric.smooth_method,
            metric.smooth_value,
            metric.effective_order,
            metric.max_ngram_order,
        )
        return {self.name: float(found.score)}

    def signature(self, num_references: Collection[int] = (1,)) -> str:
        return _signature(self._metric, num_references)


@register_scorer("bleu_zh")
class ChineseBLEU(BLEU):
    """Each Chinese character is a word."""

    name = "bleu_zh"
    options: ClassVar[dict[str, Any]] = {"tokenize": "zh"}


@register_scorer("chrf")
class ChrF(Scorer):
    """Of characters, whatever a word is."""

    name: ClassVar[str] = "chrf"

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.references: list[tuple[str, ...]] = []
        self._metric = _metrics(self.name).CHRF()

    def add(self, answer: str, *references: str) -> None:
        self.answers.append(answer)
        self.references.append(references)

    def result(self) -> dict[str, float]:
        if not self.answers:
            return {}
        streams = [*zip_longest(*self.references)]  # sacrebleu takes None where an answer has fewer than others
        return {self.name: float(self._metric.corpus_score(self.answers, streams).score)}

    def signature(self, num_references: Collection[int] = (1,)) -> str:
        return _signature(self._metric, num_references)


def _signature(metric: Any, num_references: Collection[int]) -> str:
    """The signature of a metric of sacrebleu, which has none before it has measured something."""
    numbers = {*num_references}
    metric.num_refs = numbers.pop() if len(numbers) == 1 else -1  # -1: sacrebleu's sign for "var"
    return str(metric.get_signature())


def _metrics(name: str) -> Any:
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise UserError(
            f"`scoring` {name} needs the package sacrebleu; install it by: pip install 'ftk[metrics]'"
        ) from error
    return metrics
