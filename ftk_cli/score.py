"""What ftk-generate adds up: how well answers were found, or how likely given ones are; of earlier runs, too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ftk_cli.records import num_steps

if TYPE_CHECKING:
    from ftk.evaluation.base import Scorer
    from ftk_cli.records import Records
    from ftk_cli.results import OldRecord


class Found:
    """Answers that were found, compared with the references that there are.

    Args:
        records: makes the record of a sample.
        scorers: by name.
        headline: what stands in front of each score.
    """

    def __init__(self, records: Records, scorers: dict[str, Scorer], headline: str) -> None:
        self.records, self.scorers, self.headline = records, scorers, headline

    def earlier(self, old: OldRecord) -> None:
        """The record of an earlier run."""
        self._compare(old.answers)

    def add(self, index: int, prompt: Any, result: Any, tokenizer: Any) -> tuple[list[str], int]:
        """A prompt and what came of it: its lines, and how many tokens were found."""
        if prompt.references is not None:
            self._compare(zip((answer.text for answer in result.answers), prompt.references, strict=True))
        return self.records.answered(index, result, tokenizer, prompt.references), num_steps(result.answers)

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
    """Log-probabilities of answers that were given; of several candidates the likeliest one counts.

    Args:
        records: makes the record of a sample.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self.samples = self.tokens = 0
        self.logprob = 0.0

    def earlier(self, old: OldRecord) -> None:
        """The record of an earlier run."""
        if old.likeliest is not None:
            self._add(*old.likeliest)

    def add(
        self, index: int, prompt: Any, candidates: Sequence[Sequence[Any]], tokenizer: Any
    ) -> tuple[list[str], int]:
        """A prompt with the answers of each candidate: its lines, and how many tokens were scored."""
        totals = [sum(answer.logprob for answer in answers) for answers in candidates]
        best = max(range(len(totals)), key=totals.__getitem__)
        self._add(totals[best], num_steps(candidates[best]))
        lines = self.records.scored(index, prompt.prompt, candidates, best, tokenizer)
        return lines, sum(map(num_steps, candidates))

    def lines(self) -> list[str]:
        """The sums."""
        mean = self.logprob / max(self.tokens, 1)
        samples = "sample" if self.samples == 1 else "samples"
        return [
            f"scored {self.samples} {samples} ({self.tokens} tokens): log-probability {self.logprob:.4f}, "
            f"{mean:.4f} a token, perplexity {math.exp(min(-mean, 700.0)):.4f}"
        ]

    def _add(self, logprob: float, tokens: int) -> None:
        self.samples += 1
        self.logprob += logprob
        self.tokens += tokens
