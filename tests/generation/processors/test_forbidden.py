"""Forbidden tokens, phrases and n-grams against searches through plain lists."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ftk.generation.processors.forbidden import ForbiddenPhrases, ForbiddenTokens, NoRepeatNgram
from tests.generation.processors.helpers import allowed, run, state_of

WORDS = st.sampled_from([3, 4, 5])  # few, so that they repeat; none is the end
ROWS = st.integers(0, 9).flatmap(lambda n: st.lists(st.lists(WORDS, min_size=n, max_size=n), min_size=1, max_size=4))


def ngrams(tokens, size):
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


@given(ROWS, st.integers(1, 4))
def test_a_token_is_forbidden_just_when_it_would_repeat_an_ngram(rows, size):
    scores = run(NoRepeatNgram(size), state_of([rows]))
    for tokens, found in zip(rows, allowed(scores)[0], strict=True):
        repeated = {
            token
            for token in range(8)
            if len(tokens) >= size - 1
            and ngrams([*tokens, token], size)[-1:] != []
            and ngrams([*tokens, token], size)[-1] in ngrams(tokens, size)
        }
        assert found == set(range(8)) - repeated


def test_no_ngram_comes_twice_over_a_whole_answer():
    generator = torch.Generator().manual_seed(0)
    tokens = []
    for _ in range(60):
        scores = run(NoRepeatNgram(2), state_of([[tokens]], torch.randn(1, 1, 12, generator=generator)))
        tokens.append(int(scores[0, 0, 3:].argmax()) + 3)
    assert len(set(ngrams(tokens, 2))) == 59


@given(ROWS, st.lists(st.lists(WORDS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4))
def test_phrases_are_forbidden_where_they_would_be_completed(rows, phrases):
    scores = run(ForbiddenPhrases(phrases), state_of([rows]))
    for tokens, found in zip(rows, allowed(scores)[0], strict=True):
        completed = {token for token in range(8) for phrase in phrases if (*tokens, token)[-len(phrase) :] == phrase}
        assert found == set(range(8)) - completed


def test_tokens_and_rows_that_pad_the_vocabulary():
    scores = run(ForbiddenTokens([0, 3], first_unused=6), state_of([[[5]], [[7]]]))
    assert allowed(scores) == [[{1, 2, 4, 5}]] * 2
    assert allowed(run(ForbiddenTokens([]), state_of([[[5]]]))) == [[set(range(8))]]
