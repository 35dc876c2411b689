"""BLEU and chrF of answers are those that sacrebleu gives; without it one line says what to install."""

from __future__ import annotations

import sys

import pytest

from ftk.errors import UserError
from ftk.evaluation.base import build_scorer

ANSWERS = ["The cat sat on the mat today .", "A bird flies over two old trees.", "nothing alike"]
REFERENCES = ["The cat sat on the mat.", "One bird flew over two old trees.", "seven hills"]
CHINESE = (["北京是中国的首都城市。"], ["北京是中国的首都。"])


def scored(name: str, answers: list[str], references: list[str]) -> float:
    scorer = build_scorer(name)
    assert scorer.result() == {}
    for pair in zip(answers, references, strict=True):
        scorer.add(*pair)
    return scorer.result()[name]


def test_scores_are_sacrebleus() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    assert scored("bleu", ANSWERS, REFERENCES) == sacrebleu.corpus_bleu(ANSWERS, [REFERENCES]).score > 20
    assert scored("chrf", ANSWERS, REFERENCES) == sacrebleu.corpus_chrf(ANSWERS, [REFERENCES]).score > 20
    assert scored("bleu_zh", *CHINESE) == sacrebleu.corpus_bleu(CHINESE[0], [CHINESE[1]], tokenize="zh").score > 20
    assert scored("bleu", REFERENCES, REFERENCES) == pytest.approx(100.0)


def test_the_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UserError, match=r"`scoring` bleu needs the package sacrebleu; .*pip install 'ftk\[metrics\]'"):
        build_scorer("bleu")


def test_sums_over_answers_have_the_score_of_the_corpus() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    scorer = build_scorer("bleu")
    references = [[reference, answer.lower()] for answer, reference in zip(ANSWERS, REFERENCES, strict=True)]
    parts = [scorer.measure(answer, several) for answer, several in zip(ANSWERS, references, strict=True)]
    streams = [[several[number] for several in references] for number in range(2)]
    found = scorer.values([sum(part) for part in zip(*parts, strict=True)])["bleu"]
    assert found == pytest.approx(sacrebleu.corpus_bleu(ANSWERS, streams).score)
    assert scorer.signature({2}).startswith("nrefs:2|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_chrf_takes_all_references_of_an_answer() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    scorer = build_scorer("chrf")
    references = [[REFERENCES[0], ANSWERS[0].lower()], [REFERENCES[1]], [REFERENCES[2]]]
    for answer, several in zip(ANSWERS, references, strict=True):
        scorer.add(answer, *several)
    expected = sacrebleu.corpus_chrf(ANSWERS, [REFERENCES, [ANSWERS[0].lower(), None, None]]).score
    assert scorer.result()["chrf"] == expected > sacrebleu.corpus_chrf(ANSWERS, [REFERENCES]).score


@pytest.mark.parametrize("name", ["bleu", "bleu_zh", "chrf"])
def test_a_signature_needs_no_answers_and_says_how_many_references_there_are(name: str) -> None:
    pytest.importorskip("sacrebleu")
    scorer = build_scorer(name)
    assert [scorer.signature(numbers).split("|")[0] for numbers in ({1}, {3}, {1, 2})] == [
        "nrefs:1",
        "nrefs:3",
        "nrefs:var",
    ]
