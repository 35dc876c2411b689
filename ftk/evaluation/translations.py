"""Scorers for translations: BLEU (Papineni et al. 2002) and chrF (Popović 2015) as sacrebleu computes them."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.errors import UserError
from ftk.evaluation.base import Scorer
from ftk.registry import register_scorer


class _SacreBLEU(Scorer):
    """A number over the whole corpus; answers and references as text, which the library divides into words itself."""

    name: ClassVar[str]
    metric: ClassVar[str] = "BLEU"
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        try:
            from sacrebleu import metrics
        except ImportError as error:
            raise UserError(
                f"`scoring` {self.name} needs the package sacrebleu; install it by: pip install 'ftk[metrics]'"
            ) from error
        self.answers: list[str] = []
        self.references: list[str] = []
        self._metric = getattr(metrics, self.metric)(**self.options)

    def add(self, answer: str, reference: str) -> None:
        self.answers.append(answer)
        self.references.append(reference)

    def result(self) -> dict[str, float]:
        if not self.answers:
            return {}
        return {self.name: float(self._metric.corpus_score(self.answers, [self.references]).score)}


@register_scorer("bleu")
class BLEU(_SacreBLEU):
    """With sacrebleu's usual words (13a)."""

    name = "bleu"


@register_scorer("bleu_zh")
class ChineseBLEU(_SacreBLEU):
    """Each Chinese character is a word."""

    name = "bleu_zh"
    options: ClassVar[dict[str, Any]] = {"tokenize": "zh"}


@register_scorer("chrf")
class ChrF(_SacreBLEU):
    """Of characters, whatever a word is."""

    name = "chrf"
    metric = "CHRF"
