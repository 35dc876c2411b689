"""What ftk-generate adds up: how well answers were found, or how likely given ones are; of earlier runs, too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ftk.errors import counted
from ftk_cli.records import num_steps, total_logprob

if TYPE_CHECKING:
    from ftk.evaluation.base import Scorer
    from ftk.generation.results import EncodedText, TextAnswer, TextResult
    from ftk_cli.results import OldRecord


class Found:
    """Answers that were found, compared with the references that there are.

    Args:
        scorers: by name.
        headline: printed before each score.
    """

    def __init__(self, scorers: dict[str, Scorer], headline: str) -> None:
        self.scorers, self.headline = scorers, headline

    def earlier(self, old: OldRecord) -> None:
        """The record of an earlier run."""
        self._compare(old.answers)

    def add(self, prompt: EncodedText, result: TextResult) -> int:
        """A prompt and its answers; gives the number of tokens that were found."""
        if prompt.references is not None:
            self._compare(zip((answer.text for answer in result.answers), prompt.references, strict=True))
        return num_steps(result.answers)

    def lines(self) -> list[str]:
        """The scores."""
        return [
            f"{self.headline}: {name} = {value:.2f} %"
            for scorer in self.scorers.values()
            for name, value in scorer.result().items()
        ]

    def _compare(self, pairs: Iterable[tuple[str, str]]) -> None:
        for text, reference in pairs:
            for scorer in self.scorers.values():
                scorer.add(text, reference)


class Given:
    """Log-probabilities of given answers, summed; of several candidates the likeliest one counts."""

    def __init__(self) -> None:
        self.samples = self.tokens = 0
        self.logprob = 0.0

    def earlier(self, old: OldRecord) -> None:
        """The record of an earlier run."""
        if old.likeliest is not None:
            self._add(*old.likeliest)

    def add(self, prompt: EncodedText, candidates: Sequence[Sequence[TextAnswer]]) -> int:
        """A prompt with the answers of each candidate; gives the number of tokens that were scored."""
        best = max(candidates, key=total_logprob)
        self._add(total_logprob(best), num_steps(best))
        return sum(map(num_steps, candidates))

    def lines(self) -> list[str]:
        """The sums."""
        mean = self.logprob / max(self.tokens, 1)
        return [
            f"scored {counted(self.samples, 'sample')} ({self.tokens} tokens): log-probability {self.logprob:.4f}, "
            f"{mean:.4f} per token, perplexity {math.exp(min(-mean, 700.0)):.4f}"
        ]

    def _add(self, logprob: float, tokens: int) -> None:
        self.samples += 1
        self.logprob += logprob
        self.tokens += tokens
