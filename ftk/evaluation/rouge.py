"""The scorer for summaries: ROUGE (Lin 2004) as rouge-score computes it, with Chinese characters as words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from ftk.config.options import option
from ftk.errors import UserError
from ftk.evaluation.answers import IDEOGRAPH
from ftk.evaluation.base import SumScorer
from ftk.registry import register_scorer

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@dataclass(kw_only=True)
class RougeConfig:
    stemmer: bool = option(True, "compare English words without their endings (Porter 1980)")


@register_scorer("rouge", config=RougeConfig)
class Rouge(SumScorer):
    """Mean F of ROUGE-1, -2, -L and -Lsum in percent; of several references the best of each kind counts.

    Lsum takes the lines of a text as its sentences.
    """

    def __init__(self, config: RougeConfig) -> None:
        super().__init__()
        self.config = config
        try:
            from rouge_score import rouge_scorer, tokenizers
        except ImportError as error:
            raise UserError(
                "`scoring` rouge needs the package rouge-score; install it by: pip install 'ftk[metrics]'"
            ) from error
        words = Words(tokenizers.DefaultTokenizer(config.stemmer))
        self._scorer = rouge_scorer.RougeScorer(list(KINDS), tokenizer=words)

    def measure(self, answer: str, references: Sequence[str]) -> Sequence[float]:
        found = self._scorer.score_multi(references, answer)
        return [*(found[kind].fmeasure for kind in KINDS), 1.0]

    def values(self, sums: Sequence[float]) -> dict[str, float]:
        *totals, count = sums
        return {kind: 100.0 * total / count for kind, total in zip(KINDS, totals, strict=True)}

    def signature(self, num_references: Collection[int] = (1,)) -> str:
        return f"rouge-score {version('rouge-score')}, stemmer {'on' if self.config.stemmer else 'off'}"


class Words:
    """Divides a text as rouge-score does, which drops all but ASCII letters and digits, and keeps each CJK character.

    Args:
        of_others: divides what stands between such characters.
    """

    def __init__(self, of_others: Any) -> None:
        self._of_others = of_others

    def tokenize(self, text: str) -> list[str]:
        """The words, in their order."""
        words: list[str] = []
        end = 0
        for match in IDEOGRAPH.finditer(text):
            words += [*self._of_others.tokenize(text[end : match.start()]), match[0]]
            end = match.end()
        return [*words, *self._of_others.tokenize(text[end:])]
