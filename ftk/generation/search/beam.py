"""Beam search."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ftk.batch import sent
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.base import Processors, index_of
from ftk.generation.search.answer import Answer
from ftk.generation.search.base import Move, Search, SearchTask, answer_of, ranked
from ftk.generation.search.ranking import stable_topk
from ftk.registry import register_search

_DEAD = float("-inf")


class Candidates(NamedTuple):
    """Continuations of the hypotheses of each prompt, best first; all [N, C]."""

    scores: Tensor  # sums of processed scores; -inf: there is none
    sources: Tensor  # the hypothesis that each continues
    tokens: Tensor  # the token that each adds


class Beam:
    """W hypotheses of each of N prompts, and the best W answers that each has so far.

    Args:
        config: length penalty, early stopping, greatest length.
        width: W.
    """

    def __init__(self, config: GenerationConfig, task: SearchTask, width: int) -> None:
        self.config = config
        self.width = width
        self.ends = index_of(task.end_ids, task.device)
        self.length = 0
        shape = (task.num_prompts, width, config.max_len)
        self.scores = torch.zeros(shape[0], 1, device=task.device)  # [N, W], from the first step on
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=task.device)
        self.logprobs = torch.zeros(shape, device=task.device)
        self.closed = torch.zeros(shape[0], dtype=torch.bool, device=task.device)  # nothing changes any more
        self.done_scores = torch.full(shape[:2], _DEAD, device=task.device)  # over length ** length_penalty
        self.done_lengths = torch.zeros(shape[:2], dtype=torch.int64, device=task.device)
        self.done_ended = torch.zeros(shape[:2], dtype=torch.bool, device=task.device)
        self.done_tokens = torch.zeros(shape, dtype=torch.int64, device=task.device)
        self.done_logprobs = torch.zeros(shape, device=task.device)

    def totals(self, scores: Tensor) -> Tensor:
        """Scores of all continuations, [N, W, V], from those of the tokens; NaN counts as impossible."""
        return (self.scores[:, :, None] + scores).nan_to_num(nan=_DEAD, neginf=_DEAD)

    @property
    def num_candidates(self) -> int:
        """Candidates per step: enough that W continue, however many end."""
        return (1 + len(self.ends)) * self.width

    def best(self, totals: Tensor) -> Candidates:
        """The best continuations of [N, W, V]."""
        scores, indices = stable_topk(totals.flatten(1), min(self.num_candidates, totals[0].numel()))
        return Candidates(scores, indices // totals.size(-1), indices % totals.size(-1))

    def at(self, totals: Tensor, chosen: list[list[int]]) -> Candidates:
        """The continuations of [N, W, V] that a processor has chosen: per prompt indices into [W * V]."""
        count = max(1, *map(len, chosen))
        padded = sent(torch.tensor([[*row, *[0] * (count - len(row))] for row in chosen]), totals.device)
        there = sent(torch.tensor([[place < len(row) for place in range(count)] for row in chosen]), totals.device)
        scores = totals.flatten(1).gather(1, padded).masked_fill(~there, _DEAD)
        return Candidates(scores, padded // totals.size(-1), padded % totals.size(-1))

    def step(self, candidates: Candidates, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the candidates that end as answers, and continues the others.

        Args:
            candidates: C of each prompt.
            logprobs: [N, W, V], the model's own.

        Returns:
            the next tokens [N, W], and the hypotheses [N, W] that they continue.
        """
        rows = torch.arange(logprobs.size(0), device=logprobs.device)[:, None]  # [N, 1]
        own = logprobs[rows, candidates.sources, candidates.tokens]  # [N, C]
        ends = torch.isin(candidates.tokens, self.ends)  # [N, C]
        self._set_aside(rows, candidates, own, ends)
        sources = self._go_on(rows, candidates, own, ends)
        self.length += 1
        self.closed = self.closed | self._cannot_improve()
        return self.tokens[:, :, self.length - 1].clone(), sources

    def answers(self) -> list[list[Answer]]:
        """Per prompt its answers, best first."""
        columns = (self.done_tokens, self.done_logprobs, self.done_scores, self.done_lengths, self.done_ended)
        return [
            [
                answer_of(tokens, logprobs, score, length, ended)
                for tokens, logprobs, score, length, ended in zip(*prompt, strict=True)
                if length > 0
            ]
            for prompt in zip(*(part.tolist() for part in columns), strict=True)
        ]

    def keep(self, rows: Tensor) -> None:
        """Of the prompts only `rows`, int64 [R], stay, in this order."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name != "ends":
                setattr(self, name, value[rows])

    def _set_aside(self, rows: Tensor, candidates: Candidates, own: Tensor, ends: Tensor) -> None:
        """Those of the best W candidates that end (at the greatest length all) compete with earlier answers."""
        width, length = self.width, self.length + 1
        scores, sources, tokens = (part[:, :width] for part in candidates)
        ends, own = ends[:, :width], own[:, :width]
        complete = ends if length < self.config.max_len else torch.ones_like(ends)
        complete = complete & ~self.closed[:, None]
        normalized = (scores / length**self.config.length_penalty).masked_fill(~complete, _DEAD)
        self.done_scores, chosen = stable_topk(torch.cat((self.done_scores, normalized), dim=1), width)
        found = self.done_scores.isfinite()

        def merge(old: Tensor, new: Tensor) -> Tensor:
            return torch.cat((old, new.to(old.dtype)), dim=1)[rows, chosen]

        self.done_lengths = merge(self.done_lengths, torch.full_like(tokens, length)).masked_fill(~found, 0)
        self.done_ended = merge(self.done_ended, ends)
        self.done_tokens = merge(self.done_tokens, self._continued(self.tokens, rows, sources, tokens))
        self.done_logprobs = merge(self.done_logprobs, self._continued(self.logprobs, rows, sources, own))

    def _go_on(self, rows: Tensor, candidates: Candidates, own: Tensor, ends: Tensor) -> Tensor:
        """The best W candidates that do not end become the hypotheses; missing ones are dead, at -inf."""
        alive = candidates.scores.masked_fill(ends, _DEAD)  # [N, C]
        self.scores, chosen = stable_topk(alive, min(self.width, alive.size(1)))
        missing = self.width - chosen.size(1)
        if missing > 0:  # a beam wider than the vocabulary
            chosen = torch.cat((chosen, chosen[:, :1].expand(-1, missing)), dim=1)
            self.scores = nn.functional.pad(self.scores, (0, missing), value=_DEAD)
        sources, tokens, own = (part.gather(1, chosen) for part in (candidates.sources, candidates.tokens, own))
        self.tokens = self._continued(self.tokens, rows, sources, tokens)
        self.logprobs = self._continued(self.logprobs, rows, sources, own)
        return sources

    def _continued(self, lines: Tensor, rows: Tensor, sources: Tensor, new: Tensor) -> Tensor:
        """Copies of the lines [N, W, max_len] at `sources`, each with its next value: [N, X, max_len]."""
        lines = lines[rows, sources]
        lines[:, :, self.length] = new
        return lines

    def _cannot_improve(self) -> Tensor:
        """bool [N]: by the rule of early stopping, or because no hypothesis is left."""
        full = self.done_scores[:, -1].isfinite()
        if self.config.early_stopping != "true":
            penalty = self.config.length_penalty
            to_the_end = self.config.early_stopping == "never" and penalty > 0
            length = self.config.max_len if to_the_end else self.length
            full = full & (self.scores[:, 0] / length**penalty <= self.done_scores[:, -1])
        return full | (self.scores[:, 0] == _DEAD)


@register_search("beam")
class BeamSearch(Search):
    """Beam search as in fairseq and transformers: of the best candidates those that end are set aside.

    An end token counts only among the best W candidates of its prompt; W answers at most are kept, and a better
    one replaces the worst. At the greatest length the best W candidates compete as they are. The best answer
    has the greatest sum of scores / length ** length_penalty, the end token included in both. When a prompt is
    finished is `early_stopping`: "true", with W answers; "false", when moreover the best hypothesis, at its
    present length, scores no better than the worst of them; "never", when it could not at any length (with a
    positive length penalty: at the greatest), given that scores only sink. Candidates of equal score are taken
    in the order of hypothesis and token.
    """

    def __init__(
        self, config: GenerationConfig, task: SearchTask, processors: Processors | None = None, options: Any = None
    ) -> None:
        super().__init__(config, task, processors, options)
        self.beam = Beam(config, task, config.beam)

    @staticmethod
    def width(config: GenerationConfig, options: Any = None) -> int:
        return config.beam

    def _advance(self, scores: Tensor, logprobs: Tensor) -> Move:
        return Move(*self.beam.step(self.candidates(scores), logprobs))

    def candidates(self, scores: Tensor) -> Candidates:
        """The continuations to choose from: processed scores [N, 1 or W, V] -> [N, C]."""
        totals = self.beam.totals(scores)
        chosen = self.processors.select(totals, self.beam.width, self.beam.num_candidates)
        return self.beam.best(totals) if chosen is None else self.beam.at(totals, chosen)

    def finished(self) -> Tensor:
        return self.beam.closed

    def answers(self) -> list[list[Answer]]:
        return [ranked(found)[: self.config.nbest] for found in self.beam.answers()]

    def tokens_so_far(self) -> Tensor:
        return self.beam.tokens[:, :, : self.step]

    def keep(self, rows: Tensor) -> None:
        self.keep_task(rows)
        self.beam.keep(rows)
