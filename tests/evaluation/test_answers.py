"""Scorers of short answers."""

from __future__ import annotations

import pytest

from ftk.errors import UserError
from ftk.evaluation.answers import cmrc_words, has_words_of, squad_words, token_f1, words_of
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


def test_texts_match_however_a_tokenizer_divides_their_words():
    assert has_words_of("the dog ' s 4 . 5 - year - old friend", "Dog's 4.5-year-old friend.")
    assert not has_words_of("the dog ' s friend", "the dogs' friends")
    assert build_scorer("exact_match").score("it ' s", "it's") == 1.0


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The U.S.  Army, an", ["us", "army"]),
        ("$5 – naïve–x", ["5", "–", "naïve–x"]),  # ASCII punctuation alone
        ("theatre a", ["theatre"]),
        ("北京，a city", ["北", "京", "，", "city"]),
        ("北京市", ["北", "京", "市"]),
        ("", []),
    ],
)
def test_words_of_squad_are_those_of_its_script(text, words):
    assert squad_words(text) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("《BERT》模型3.5", ["bert", "模", "型", "3.5"]),
        ("约1,200 km/h(快)%", ["约", "1200", "kmh", "快", "%"]),
        ("……", ["…", "…"]),  # in the script's list, but as two characters
    ],
)
def test_words_of_cmrc_are_those_of_its_script(text, words):
    assert cmrc_words(text) == words


@pytest.mark.parametrize(
    ("name", "answer", "references", "score"),
    [
        ("squad_em", "the Cat!", ["cat"], 100.0),
        ("squad_em", "cats", ["cat"], 0.0),
        ("squad_em", "dog", ["cat", "a dog"], 100.0),
        ("squad_f1", "black cat", ["the black dog"], 50.0),
        ("squad_f1", "black cat", ["dog", "cat"], 100 * 2 / 3),
        ("squad_f1", "the", ["a"], 100.0),
        ("squad_f1", "the", ["cat"], 0.0),
        ("squad_f1", "北京大学", ["清华大学"], 50.0),
        ("token_f1", "black cat", ["dog", "the black cat"], 100.0),
        ("cmrc_em", "《踢爆》。", ["踢爆"], 100.0),
        ("cmrc_em", "踢 爆", ["踢爆"], 100.0),
        ("cmrc_em", "中国(南京),", ["中国（南京），"], 100.0),  # as SentencePiece writes it
        ("cmrc_em", "99%", ["99"], 0.0),  # the script knows no such mark
        ("cmrc_em", "in BERT", ["inbert", "In bert"], 100.0),
        ("cmrc_f1", "北京的大学", ["北京大学"], 100 * 4 / 9),  # a run of two, where squad_f1 counts four
        ("cmrc_f1", "在Nexon的3.5公里", ["nexon的3.5"], 100 * 6 / 9),
        ("cmrc_f1", "。", ["北京"], 0.0),
    ],
)
def test_the_best_of_several_references_counts(name, answer, references, score):
    scorer = build_scorer(name)
    assert scorer.values(scorer.measure(answer, references)) == {name: pytest.approx(score)}
