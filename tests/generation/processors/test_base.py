"""The chain: its order, its way out, and what it passes on."""

from __future__ import annotations

import torch

from ftk.generation.processors import Processor, Processors
from ftk.generation.processors.forbidden import ForbiddenTokens
from tests.generation.processors.helpers import allowed, run, state_of


class Note(Processor):
    def __init__(self, log, name):
        self.log, self.name = log, name

    def __call__(self, state, scores):
        self.log.append(self.name)
        return scores

    def reorder(self, sources):
        self.log.append((self.name, "reorder", sources.tolist()))

    def keep(self, rows):
        self.log.append((self.name, "keep", rows.tolist()))


def test_the_order_is_that_of_the_list_and_hooks_reach_everyone():
    log = []
    chain = Processors([Note(log, "a"), Note(log, "b")])
    run(chain, state_of([[[5]]]))
    chain.reorder(torch.tensor([[0]]))
    chain.keep(torch.tensor([0]))
    expected = ["a", "b", *((n, "reorder", [[0]]) for n in "ab"), *((n, "keep", [0]) for n in "ab")]
    assert log == expected


def test_where_everything_is_forbidden_the_ends_come_back_with_their_own_scores():
    class SecondRow(Processor):
        def __call__(self, state, scores):
            scores[:, 1] = -torch.inf
            return scores

    state = state_of([[[5], [6]]], ends=(2, 7))
    scores = run(Processors([ForbiddenTokens([2]), SecondRow()]), state)
    assert allowed(scores) == [[set(range(8)) - {2}, {2, 7}]]
    assert torch.equal(scores[0, 1, [2, 7]], state.logprobs[0, 1, [2, 7]])


def test_an_end_without_any_probability_is_a_way_out_all_the_same():
    logits = torch.zeros(1, 1, 8)
    logits[..., 2] = -torch.inf
    scores = run(Processors([ForbiddenTokens(range(8))]), state_of([[[5]]], logits))
    assert allowed(scores) == [[{2}]]


def test_a_broken_model_stays_broken():
    scores = run(Processors([ForbiddenTokens([5])]), state_of([[[5]]], torch.full((1, 1, 8), torch.nan)))
    assert scores[0, 0, 2].isnan()


def test_open_rows_leave_out_those_that_have_ended():
    state = state_of([[[5, 6], [5, 2]], [[2, 7], [7, 7]]])
    assert [tuple(row) for row in state.open_rows()] == [(0, 0, [5, 6]), (1, 1, [7, 7])]
    assert state.step == 2
