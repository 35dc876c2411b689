"""ROUGE is that of rouge-score, and counts Chinese characters, of which that package sees none."""

from __future__ import annotations

import sys

import pytest

from ftk.errors import UserError
from ftk.evaluation.base import build_scorer
from ftk.evaluation.rouge import KINDS, Words

ANSWER = "The cats were running over the mats.\nA dog slept."
REFERENCE = "A cat ran over the mat.\nThe dog was sleeping."


def scored(line: str, answer: str, *references: str) -> dict[str, float]:
    scorer = build_scorer(line)
    return scorer.values(scorer.measure(answer, references))  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("stemmer", [True, False])
def test_scores_of_english_are_those_of_the_package(stemmer: bool) -> None:
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    expected = rouge_scorer.RougeScorer(KINDS, use_stemmer=stemmer).score(REFERENCE, ANSWER)
    found = scored(f"rouge stemmer={str(stemmer).lower()}", ANSWER, REFERENCE)
    assert found == {kind: pytest.approx(100 * expected[kind].fmeasure) for kind in KINDS}
    assert found["rougeLsum"] != found["rougeL"]


def test_the_best_reference_of_each_kind_counts() -> None:
    pytest.importorskip("rouge_score")
    assert scored("rouge", "a b", "x", "b a") == {
        "rouge1": pytest.approx(100.0),
        "rouge2": 0.0,
        "rougeL": pytest.approx(50.0),
        "rougeLsum": pytest.approx(50.0),
    }


def test_chinese_characters_are_words() -> None:
    pytest.importorskip("rouge_score")
    same = scored("rouge", "北京是首都。", "北京是首都。")
    assert same == dict.fromkeys(KINDS, pytest.approx(100.0))
    half = scored("rouge", "北京大学", "清华大学")
    assert half["rouge1"] == pytest.approx(50.0)
    assert half["rouge2"] == pytest.approx(100 / 3)


def test_other_text_is_divided_by_the_package() -> None:
    class Upper:
        def tokenize(self, text: str) -> list[str]:
            return text.upper().split()

    assert Words(Upper()).tokenize("in 北京 city, 中国 now") == ["IN", "北", "京", "CITY,", "中", "国", "NOW"]
    assert Words(Upper()).tokenize("no other") == ["NO", "OTHER"]


def test_the_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(UserError, match=r"`scoring` rouge needs the package rouge-score; .*'ftk\[metrics\]'"):
        build_scorer("rouge")
