"""Scorers of short answers."""

from __future__ import annotations

import pytest

from ftk.errors import UserError
from ftk.evaluation.answers import token_f1, words_of
from ftk.evaluation.base import build_scorer


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The U.S. Army", ["us", "army"]),
        ("  an  apple, a day ", ["apple", "day"]),
        ("北京 city，中国", ["北", "京", "city", "中", "国"]),
        ("ＧＬＭ", ["glm"]),
        ("Straße", ["strasse"]),
        ("", []),
        ("...", []),
    ],
)
def test_words_are_compared_without_case_punctuation_and_articles(text, words):
    assert words_of(text) == words


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("Stanford University", "the stanford university", 1.0),
        ("Stanford", "Stanford University", 2 / 3),
        ("a b b", "b", 2 / 3),
        ("Oxford", "Stanford", 0.0),
        ("", "", 1.0),
        ("", "x", 0.0),
        ("x", "", 0.0),
        ("北京大学", "清华大学", 0.5),
    ],
)
def test_token_f1(answer, reference, score):
    assert token_f1(answer, reference) == pytest.approx(score)


def test_scorers_are_means_in_percent_and_empty_without_pairs():
    for name, expected in (("exact_match", 100 / 3), ("token_f1", 100 * (1 + 2 / 3) / 3)):
        scorer = build_scorer(name)
        assert scorer.result() == {}
        for answer, reference in (("A cat!", "cat"), ("black cat", "cat"), ("dog", "cat")):
            scorer.add(answer, reference)
        assert scorer.result() == {name: pytest.approx(expected)}


def test_an_unknown_scorer_lists_those_that_exist():
    with pytest.raises(UserError, match="exact_match.*token_f1"):
        build_scorer("bleu_1000")
