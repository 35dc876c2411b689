"""Forced prefixes and functions that allow tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftk.errors import UserError
from ftk.generation.processors.prefix import AllowedTokens, ForcedPrefix
from tests.generation.processors.helpers import allowed, run, state_of

ROW = st.lists(st.sampled_from([4, 5, 6]), min_size=1, max_size=3).map(tuple)
EVERYTHING = set(range(8))


@given(st.lists(ROW, min_size=1, max_size=3), st.lists(st.sampled_from([4, 5, 6]), max_size=4))
def test_a_prefix_allows_what_goes_on_with_one_of_its_rows(prefixes, tokens):
    state = state_of([[tokens]])
    (((found,),), step) = (allowed(run(ForcedPrefix({-1: prefixes}), state)), len(tokens))
    begun = tuple(tokens)
    if any(begun[: len(one)] == one for one in prefixes):
        assert found == EVERYTHING
    else:
        goes_on = {one[step] for one in prefixes if one[:step] == begun and len(one) > step}
        assert found == (goes_on or EVERYTHING)


def test_a_forced_token_has_the_models_score_whatever_forbade_it():
    state = state_of([[[]]])
    scores = state.logprobs.clone()
    scores[...] = float("-inf")
    scores = ForcedPrefix({-1: [(5, 6)]})(state, scores)
    assert allowed(scores) == [[{5}]]
    assert scores[0, 0, 5] == state.logprobs[0, 0, 5]


def test_each_blank_has_its_own_prefix():
    state = state_of([[[]], [[]], [[]]], blank=[0, 1, 2])
    assert allowed(run(ForcedPrefix({0: [(5,)], 1: [], -1: [(6,)]}), state)) == [[{5}], [EVERYTHING], [{6}]]


def test_a_function_sees_prompt_blank_and_answer_and_decides():
    seen = []

    def digits(context, blank, tokens):
        seen.append((context, blank, tokens))
        return None if tokens == [7] else (4, 5) if blank == 0 else []

    state = state_of([[[5], [7], [2]], [[6], [6], [6]]], blank=[0, 1], contexts=[[1, 4], [4]])
    assert allowed(run(AllowedTokens(digits), state)) == [[{4, 5}, EVERYTHING, EVERYTHING], [set()] * 3]
    assert ([1, 4], 0, [5]) in seen
    assert all(2 not in tokens for _, _, tokens in seen)  # nobody asks about an answer that has ended


@pytest.mark.parametrize("token", [-1, 8])
def test_a_function_that_gives_what_is_no_token_is_told_so(token):
    with pytest.raises(UserError, match=rf"allowed_tokens gave {token}; tokens are 0 to 7"):
        run(AllowedTokens(lambda *_: [5, token]), state_of([[[5]]]))
