"""Penalties against loops over single tokens; lengths of each blank."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftk.generation.engine.engine import Engine
from ftk.generation.processors import penalties
from ftk.generation.processors.base import Processors, index_of
from ftk.generation.processors.length import MaxLength, MinLength
from ftk.generation.processors.penalties import LogitDifferences, RepetitionPenalty, UnknownPenalty
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation.processors.helpers import allowed, run, state_of
from tests.generation.slow import SPECIAL, small_model

TOKENS = st.integers(0, 7)


def slow_repetition(logits, seen, penalty):
    """Keskar et al. 2019: x / I(seen) for positive x; a negative one is multiplied; softmax of all."""
    changed = [
        (one / penalty if one > 0 else one * penalty) if token in seen else one for token, one in enumerate(logits)
    ]
    total = math.log(sum(math.exp(one) for one in changed))
    return [one - total for one in changed]


@given(
    st.lists(st.lists(TOKENS, min_size=3, max_size=3), min_size=2, max_size=2),
    st.lists(TOKENS, max_size=5),
    st.sampled_from([0.5, 1.3, 4.0]),
    st.booleans(),
)
def test_repetition_penalty_equals_the_loop(rows, context, penalty, prompt):
    state = state_of([rows], contexts=[context])
    scores = run(RepetitionPenalty(penalty, prompt), state)
    for hypothesis, tokens in enumerate(rows):
        seen = (set(tokens) | (set(context) if prompt else set())) - {2}
        expected = slow_repetition(state.logits[0, hypothesis].tolist(), seen, penalty)
        assert scores[0, hypothesis].tolist() == pytest.approx(expected, abs=1e-5)


@given(
    st.lists(st.lists(TOKENS, min_size=3, max_size=3), min_size=2, max_size=2),
    st.sampled_from([-1.5, 0.0, 0.7]),
    st.sampled_from([0.0, 2.0]),
    st.dictionaries(TOKENS, st.sampled_from([-100.0, 3.5])),
)
def test_differences_of_logits_equal_the_loop(rows, frequency, presence, bias):
    state = state_of([rows])
    scores = run(LogitDifferences(frequency, presence, bias), state)
    for hypothesis, tokens in enumerate(rows):
        logits = [
            one - frequency * tokens.count(token) - presence * (token in tokens) + bias.get(token, 0)
            for token, one in enumerate(state.logits[0, hypothesis].tolist())
        ]
        expected = torch.tensor(logits).log_softmax(-1).tolist()
        assert scores[0, hypothesis].tolist() == pytest.approx(expected, abs=1e-4)


def test_it_is_done_to_logits_and_not_to_log_probabilities():
    logits = torch.tensor([[[3.0, 1.0, -1.0, 0.5, 0, 0, 0, 0]]])
    scores = run(RepetitionPenalty(2.0), state_of([[[0]]], logits))
    assert float(scores[0, 0, 0] - scores[0, 0, 1]) == pytest.approx(3.0 / 2 - 1.0, abs=1e-6)


def test_what_is_forbidden_or_impossible_stays_so_under_the_penalty():
    logits = torch.zeros(1, 1, 8)
    logits[..., 5] = -torch.inf
    state = state_of([[[5]]], logits)
    scores = state.logprobs.clone()
    scores[..., 6] = -torch.inf
    scores = RepetitionPenalty(2.0)(state, scores)
    assert allowed(scores) == [[{0, 1, 2, 3, 4, 7}]]
    assert not scores.isnan().any()


def test_other_prompts_are_other_prompts_even_when_they_are_equally_many():
    penalty = RepetitionPenalty(2.0, prompt=True)
    for contexts in ([[5], [6]], [[6], [5]], [[7, 7], [0]]):
        state = state_of([[[1]], [[1]]], contexts=contexts, logits=torch.ones(2, 1, 8))
        scores = run(penalty, state)
        for row, context in enumerate(contexts):
            less = {token for token in range(8) if scores[row, 0, token] < scores[row, 0].max() - 0.1}
            assert less == {*context, 1}


def test_the_tokens_of_a_prompt_are_gathered_once_however_many_searches_are_under_way(monkeypatch):
    met = []

    def counted(values, device):
        met.append(values)
        return index_of(values, device)

    monkeypatch.setattr(penalties, "index_of", counted)
    lengths = [1 + number % 7 for number in range(20)]  # answers that end at different steps
    contexts = [[7 + number % 5, 8 + number % 6, 3, *range(7, 7 + number)] for number in range(10)] * 2
    penalty = RepetitionPenalty(1.7, prompt=True)
    own = [Processors([MinLength([length]), MaxLength([length]), penalty]) for length in lengths]
    groups = []
    step = Engine._advance
    monkeypatch.setattr(Engine, "_advance", lambda self, logits: (groups.append(len(self._groups)), step(self, logits)))
    generator = BlankGenerator(small_model(), SPECIAL, max_len=8, batch_size=4, beam=2)
    together = generator.fill_ids(contexts, processors=own)
    assert max(groups) > 1
    assert sorted(met) == sorted(contexts)
    monkeypatch.setattr(penalties, "_MOST_PROMPTS", 1)  # forgotten again and again, with the same answers
    again = generator.fill_ids(contexts, processors=own)
    assert len(met) > 3 * len(contexts)
    assert [[a.tokens for a in answers] for answers in again] == [[a.tokens for a in answers] for answers in together]


def test_unknown_penalty():
    state = state_of([[[5], [6]]])
    scores = run(UnknownPenalty(1, 1.5), state)
    expected = state.logprobs.clone()
    expected[..., 1] -= 1.5
    assert torch.equal(scores, expected)
    assert 1 not in allowed(run(UnknownPenalty(1, math.inf), state))[0][0]


def test_shortest_and_longest_answer_of_each_blank():
    tokens = [[[5, 5]], [[5, 5]], [[5, 5]]]
    state = state_of(tokens, blank=[0, 1, 2])
    everything = set(range(8))
    assert allowed(run(MinLength([2, 3]), state)) == [[everything], [everything - {2}], [everything]]
    assert allowed(run(MinLength([2, 3], default=4), state))[2] == [everything - {2}]
    scores = run(MaxLength([2, 3]), state)
    assert allowed(scores) == [[{2}], [everything], [everything]]
    assert scores[0, 0, 2] == state.logprobs[0, 0, 2]
