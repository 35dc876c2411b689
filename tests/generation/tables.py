"""Models that are a table, and the strategies in plain lists over any next-token distribution."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ftk.tasks.glm_blank import BlankGenerator

# 0 and 1 are words, 2 ends an answer, 3 starts it, 4 is the blank; in greater tables all others are words.
TABLE_SPECIAL = SimpleNamespace(sop=3, eop=2, mask=4)


class TableModel(nn.Module):
    """log P(next | last token) from a table [V, V]; the protocol of a model, without attention."""

    def __init__(self, probabilities):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(probabilities, dtype=torch.float64).log().float())
        self.layers = nn.ModuleList()

    def embed(self, tokens, position_ids):
        return nn.functional.one_hot(tokens, len(self.table)).float()  # [B, T, V]

    def finish(self, hidden):
        return hidden

    def head(self, hidden):
        return self.table[hidden.argmax(-1)]


def random_table(size, seed):
    """Rows that sum to 1, in which start and blank never follow anything."""
    rng = random.Random(seed)
    rows = [[0.0 if to in (3, 4) else math.exp(rng.gauss(0, 1.2)) for to in range(size)] for _ in range(size)]
    return [[one / sum(row) for one in row] for row in rows]


def fill(table, **options):
    """The best answer of a table's only blank, its `others` included, as a list."""
    ((answer,),) = BlankGenerator(TableModel(table), TABLE_SPECIAL, **options).fill_ids([[4]])
    return [answer, *answer.others]


def log_row(table, tokens):
    row = table[tokens[-1] if tokens else TABLE_SPECIAL.sop]
    return [math.log(one) if one > 0 else -math.inf for one in row]


def every_answer(table, max_len, penalty):
    """All (tokens with their end, score), best first."""
    found = []
    for length in range(1, max_len + 1):
        for tokens in itertools.product(range(len(table)), repeat=length):
            if 2 in tokens[:-1] or (tokens[-1] != 2 and length < max_len):
                continue
            total = sum(log_row(table, tokens[:index])[token] for index, token in enumerate(tokens))
            if total > -math.inf:
                found.append((list(tokens), total / length**penalty))
    return sorted(found, key=lambda one: -one[1])


class SlowBeam:
    """Beam search with lists: hypotheses, answers, and when nothing changes any more."""

    def __init__(self, width, max_len, penalty, early_stopping, ends=(2,)):
        self.width, self.max_len, self.penalty, self.early_stopping = width, max_len, penalty, early_stopping
        self.ends, self.live, self.done, self.closed = ends, [([], 0.0)], [], False

    def step(self, next_scores):
        """Takes one step by next_scores(tokens); returns the tokens of the hypotheses that go on."""
        candidates = [
            (total + score, tokens, token)
            for tokens, total in self.live
            for token, score in enumerate(next_scores(tokens))
            if total + score > -math.inf
        ]
        return self.take(sorted(candidates, key=lambda one: -one[0]))

    def take(self, candidates):
        length = len(self.live[0][0]) + 1 if self.live else self.max_len
        for total, tokens, token in candidates[: self.width]:
            if not self.closed and (token in self.ends or length == self.max_len):
                self.done.append(([*tokens, token], total / length**self.penalty))
        self.done = sorted(self.done, key=lambda one: -one[1])[: self.width]
        going = [one for one in candidates if one[2] not in self.ends][: self.width]
        self.live = [([*tokens, token], total) for total, tokens, token in going]
        self.closed = self.closed or not self.live or self.is_enough(length)
        return [token for _, _, token in going]

    def is_enough(self, length):
        if len(self.done) < self.width:
            return False
        if self.early_stopping == "true":
            return True
        if self.early_stopping == "never" and self.penalty > 0:
            length = self.max_len
        return self.live[0][1] / length**self.penalty <= self.done[-1][1]


def slow_beam(next_scores, width, max_len, penalty, early_stopping="true"):
    """[(tokens with their end, score)], best first."""
    beam = SlowBeam(width, max_len, penalty, early_stopping)
    for _ in range(max_len):
        if not beam.closed:
            beam.step(next_scores)
    return beam.done


def slow_diverse_beam(next_scores, width, groups, strength, max_len, penalty, early_stopping="true"):
    """The same for diverse beam search (Vijayakumar et al. 2018, algorithm 1, Hamming diversity)."""
    beams = [SlowBeam(width // groups, max_len, penalty, early_stopping) for _ in range(groups)]
    for _ in range(max_len):
        taken: list[int] = []
        for beam in beams:
            if not beam.closed:

                def lessened(tokens, taken=tuple(taken)):
                    return [score - strength * taken.count(token) for token, score in enumerate(next_scores(tokens))]

                taken += beam.step(lessened)
    return sorted((one for beam in beams for one in beam.done), key=lambda one: -one[1])


def whole(answer, end=2):
    """The tokens of an answer with the end token, if it came."""
    return answer.tokens + [end] * answer.ended


def assert_same(found, expected, atol=1e-5):
    """That answers, best first, are those expected, [(tokens with their end, score)]."""
    assert [whole(answer) for answer in found] == [tokens for tokens, _ in expected]
    assert [answer.score for answer in found] == pytest.approx([score for _, score in expected], abs=atol)
