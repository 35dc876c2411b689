"""LAMBADA and log-probabilities of texts, compared with one forward pass for each token."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ftk.errors import UserError
from ftk.evaluation.evaluation import build_evaluation
from ftk.evaluation.likelihood import Query, Reading, encode_pair, fitted, log_likelihoods
from ftk.evaluation.metrics import measure
from tests.evaluation.conftest import FAMILIES, slow_logprobs
from tests.small_run import WORDS

PASSAGES = [
    "the quick brown fox jumps over a lazy dog",
    "she reads long letters of old\n\nfriends",
    "in silent rooms ,  letters",
]


@pytest.mark.parametrize("uni", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_one_forward_for_each_token(families, family: str, uni: bool) -> None:
    generator = families[family]
    ids = [generator.tokenizer.encode(" ".join(WORDS[start : start + 5])) for start in (0, 7, 13)]
    asked = [Query(ids[0], [ids[1][:3], ids[2][:1]]), Query(ids[1][:4], [ids[2][:2]])]
    done: list[int] = []
    found = log_likelihoods(generator, asked, Reading(unidirectional=uni), progress=done.append)
    assert sum(done) == len(asked)
    for (context, answers, _), own in zip(asked, found, strict=True):
        for answer, scored in zip(answers, own, strict=True):
            logprobs, greedy = slow_logprobs(family, generator, [*context], [*answer], uni=uni)
            assert scored.logprobs == pytest.approx(logprobs, rel=1e-5, abs=1e-5)
            assert (scored.is_greedy, len(scored.likeliest)) == (greedy, len(answer))


def test_blocks_do_not_change_what_is_found(families, monkeypatch) -> None:
    generator = families["gpt2"]
    asked = [Query([5, 6, 7 + n], [[8, 9]]) for n in range(5)]
    whole = log_likelihoods(generator, asked, Reading())
    monkeypatch.setattr("ftk.evaluation.likelihood.CONTEXTS_AT_ONCE", 2)
    for one, other in zip(whole, log_likelihoods(generator, asked, Reading()), strict=True):
        assert one[0].logprobs == pytest.approx(other[0].logprobs, abs=1e-6)


def lambada(path: Path, generator: Any, line: str) -> list[dict[str, Any]]:
    evaluation = build_evaluation(line)
    return evaluation.records(evaluation.questions(str(path), generator), generator)


@pytest.mark.parametrize("rule", ["original", "harness"])
@pytest.mark.parametrize("uni", ["false", "true"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lambada_scores_the_last_word_by_both_rules(families, tmp_path, family: str, uni: str, rule: str) -> None:
    generator, path = families[family], tmp_path / "lambada.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    records = lambada(path, generator, f"lambada rule={rule} unidirectional={uni}")
    encode = generator.tokenizer.encode
    for text, record in zip(PASSAGES, records, strict=True):
        if rule == "original":
            word = text.split()[-1]
            context, answer = encode(text[: text.rindex(word)].strip()), encode(f" {word}")
        else:
            before, _, word = text.rpartition(" ")
            spaces = len(before) - len(before.rstrip())
            before, word = before[: len(before) - spaces], before[len(before) - spaces :] + f" {word}"
            context = encode(before)
            answer = encode(word) if family == "t5" else encode(before + word)[len(context) :]
        closed = rule == "original"
        logprobs, greedy = slow_logprobs(family, generator, context, answer, closed=closed, uni=uni == "true")
        (candidate,) = record["candidates"]
        assert candidate["logprob"] == pytest.approx(sum(logprobs), rel=1e-5)
        assert (record["correct"], candidate["tokens"]) == (greedy, len(answer))


def test_lambada_counts_a_word_as_right_where_each_of_its_tokens_is_the_likeliest(families, tmp_path) -> None:
    """The model's own continuation is right; another word is not."""
    generator, path = families["gpt2"], tmp_path / "lambada.jsonl"
    texts = [" ".join(WORDS[n : n + 6]) for n in range(8)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    records = lambada(path, generator, "lambada")
    assert [record["correct"] for record in records] == [record["confidence"] == 0 for record in records]
    evaluation = build_evaluation("lambada")
    measured = measure(evaluation.metrics(), records, evaluation.group)
    right = sum(record["correct"] for record in records)
    assert measured["accuracy"].value == pytest.approx(100 * right / 8)
    mean = sum(record["candidates"][0]["logprob"] for record in records) / 8
    assert measured["perplexity"].value == pytest.approx(math.exp(-mean))


def test_lambada_cuts_a_passage_at_its_left(families, tmp_path) -> None:
    generator, path = families["gpt2"], tmp_path / "lambada.jsonl"
    path.write_text(json.dumps({"text": " ".join(WORDS * 20)}))
    (record,) = lambada(path, generator, "lambada")
    assert record["truncated"]
    assert record["length"] == generator.framing.max_positions
    assert record["candidates"][0]["logprob"] < 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": "word"}', "lambada.jsonl:1: field 'text' must have at least two words"),
        ('{"text": ""}', "lambada.jsonl:1: field 'text' is empty"),
        ('{"texts": "a b"}', "lambada.jsonl:1: field 'text' is missing"),
        ("", "lambada.jsonl holds no row"),
    ],
)
def test_rows_without_a_word_to_guess_are_named(families, tmp_path, row: str, message: str) -> None:
    (tmp_path / "lambada.jsonl").write_text(row + "\n")
    with pytest.raises(UserError, match=message):
        build_evaluation("lambada").questions(str(tmp_path / "lambada.jsonl"), families["gpt2"])


def test_an_unknown_option_of_an_evaluation_lists_those_that_exist() -> None:
    with pytest.raises(UserError, match="rule is 'mine'; it must be one of original, harness"):
        build_evaluation("lambada rule=mine")
    with pytest.raises(UserError, match=r"(?s)windows.*there are|did you mean"):
        build_evaluation("perplexity windows=3")


class Letters:
    """A tokenizer whose pieces are letters, but for "ab"."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text.replace("ab", "\u00e4")]


@pytest.mark.parametrize(
    ("context", "answer", "apart", "expected"),
    [
        ("x ", "y", False, ("x", " y")),
        ("x", " y", False, ("x", " y")),
        ("xa", "by", False, ("xa", "y")),  # the answer has what goes beyond the ids of the context alone
        ("xa", "b", False, ("x", "ä")),
        ("xa", "b", True, ("xa", "b")),
    ],
)
def test_a_pair_is_encoded_as_one_text(context: str, answer: str, apart: bool, expected: tuple[str, str]) -> None:
    found = encode_pair(Letters(), context, answer, apart=apart)  # type: ignore[arg-type]
    assert tuple("".join(map(chr, ids)) for ids in found) == expected


def test_what_the_positions_do_not_reach_is_cut_at_the_left(families) -> None:
    context = list(range(200))
    assert fitted(families["gpt2"].framing, context, 3) == context[-125:]
    assert fitted(families["glm"].framing, context, 3) == context[-122:]  # [CLS], [gMASK] and the start token
    assert fitted(families["glm"].framing, context, 3, closed=True) == context[-121:]
    assert fitted(families["t5"].framing, context, 3) == context
