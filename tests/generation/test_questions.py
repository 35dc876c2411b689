"""Cloze questions in tokens: what is cut and how far, what cannot be asked, and scores by brute force."""

from __future__ import annotations

from typing import Any

import pytest

from ftk.data.supervised.cloze import ClozeQuestion, Part, Text
from ftk.data.supervised.cloze_files import cloze_names, load_cloze
from ftk.errors import UserError
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.request import Request
from ftk.generation.engine.scoring import score
from ftk.generation.engine.source_to_target import SourceToTarget
from ftk.generation.questions import (
    MEAN,
    PER_CHARACTER,
    RESTRICTED_LOGITS,
    SCORINGS,
    SUM,
    CandidateScore,
    check_cloze,
    chosen,
    encode_questions,
    score_questions,
)
from ftk.models import build_model
from ftk.tasks.glm_blank.infill.framing import BlankFraming
from ftk.tokenizers import SpecialTokens, build_tokenizer

SPECIAL = SpecialTokens(cls=1, eos=2, pad=0, mask=3, smask=4, gmask=5, sop=6, eop=7)
SHAPE = {"vocab_size": 64, "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}


class Letters:
    """A tokenizer: each letter but the space is a token."""

    special = SPECIAL
    vocab_size = 64

    def encode(self, text: str) -> list[int]:
        return [10 + ord(letter) % 50 for letter in text if letter != " "]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [*map(self.encode, texts)]

    def token_text(self, token: int) -> str:
        return f"<{token}>"


LETTERS: Any = Letters()
MODELS = {
    "glm": lambda config: BlankFraming(SPECIAL, config),
    "gpt2": lambda config: Continuation([2], 64, begins=[1]),
    "t5": lambda config: SourceToTarget([2], [0], around=([], [2])),
}


def question(before: list[Part], behind: list[Part], candidates: tuple[str, ...] = (" no", " yes")) -> ClozeQuestion:
    texts = (Text(tuple(before), tuple(behind)),)
    labels = tuple(range(len(candidates)))
    return ClozeQuestion(texts, candidates, labels, (0,), None, 0, None, (), "rows.jsonl:1")


def encoded(asked: ClozeQuestion, framing: Any, **options: Any) -> Any:
    (found,) = encode_questions([asked], framing, LETTERS, **{"scoring": SUM, "end": True, "seq_length": 64, **options})
    return found


def test_parts_are_encoded_one_by_one_around_the_gap() -> None:
    framing = BlankFraming(SPECIAL)
    asked = question([Part("ab"), Part(" c")], [Part(".")])
    found = encoded(asked, framing)
    assert found.texts == (((*LETTERS.encode("ab"), *LETTERS.encode("c")), tuple(LETTERS.encode("."))),) * 2
    assert found.answers == ((*LETTERS.encode("no"), 7), (*LETTERS.encode("yes"), 7))
    assert (found.num_tokens, found.was_cut, len({*found.texts})) == (3 + 3 + 1 + 4, False, 1)
    assert framing.ask(*found.texts[0]).context == [1, *LETTERS.encode("abc"), 3, *LETTERS.encode("."), 2]
    assert encoded(asked, framing, end=False).answers[0] == tuple(LETTERS.encode("no"))
    words = encoded(question([], [], ("n", "y")), framing, scoring=RESTRICTED_LOGITS)
    assert (words.answers, words.num_tokens) == ((tuple(LETTERS.encode("n")), tuple(LETTERS.encode("y"))), 4)


def slow_cut(
    first: list[tuple[str, bool]], second: list[tuple[str, bool]], answer: int, length: int
) -> list[str] | None:
    """As the original cuts, letter by letter: [CLS] and the end of text, a start token or an answer, the gap itself."""
    first, second = list(first), list(second)

    def size(parts: list[tuple[str, bool]], only: bool = False) -> int:
        return sum(len(text) for text, shorten in parts if shorten or not only)

    while size(first) + size(second) + 1 + 2 + answer > length:
        longer = first if size(first, True) > size(second, True) else second
        places = [place for place, (text, shorten) in enumerate(longer) if shorten and text]
        if not places:
            return None
        longer[places[-1]] = (longer[places[-1]][0][:-1], True)
    return [text for text, _ in (*first, *second)]


@pytest.mark.parametrize("length", range(12, 33))
def test_texts_are_cut_as_the_original_cuts_them(length: int) -> None:
    first = [("abcdef", True), ("?", False), ("ghijkl", True)]
    second = [("mnopqrs", True), (":", False)]
    parts = [Part(text, shorten, part is second) for part in (first, second) for text, shorten in part]
    asked = question(parts[:2], parts[2:])
    framing = BlankFraming(SPECIAL)
    expected = [slow_cut(first, second, answer, length) for answer in (3, 4)]
    if None in expected:
        with pytest.raises(UserError, match=r"rows.jsonl:1: the pattern and the candidate .* raise `seq_length`"):
            encoded(asked, framing, seq_length=length)
        return
    found = encoded(asked, framing, seq_length=length)
    for (before, behind), kept in zip(found.texts, expected, strict=True):
        assert kept is not None
        assert [*before, *behind] == [token for text in kept for token in LETTERS.encode(text)]
    assert found.was_cut == (length < 21 + 1 + 2 + 4)
    assert found.num_tokens == min(length, 21 + 1 + 2 + 4)


def test_a_word_in_the_gap_counts_as_one_token() -> None:
    asked = question([Part("abcdefgh", True)], [Part(".")], ("n", "y"))
    found = encoded(asked, BlankFraming(SPECIAL), scoring=RESTRICTED_LOGITS, seq_length=10)
    assert [len(part) for part in found.texts[0]] == [5, 1]  # [CLS] ab... [MASK] . end start
    assert found.num_tokens == 10


@pytest.mark.parametrize("name", MODELS)
def test_no_more_tokens_are_read_than_the_limit_and_no_fewer(name: str) -> None:
    from ftk.tasks.answers import answer_sample

    framing = MODELS[name](None)
    for length in (10, 11, 30):
        found = encoded(question([Part("abcdefghijklmnop", True)], [Part(".")]), framing, seq_length=length)
        rows = [
            answer_sample(framing, framing.ask(*text), answer)
            for text, answer in zip(found.texts, found.answers, strict=True)
        ]
        sizes = [max(len(row["tokens"]), len(row["targets"])) for row in rows]
        assert max(sizes) == found.num_tokens
        assert found.num_tokens == length if found.was_cut else found.num_tokens <= length


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_models_that_read_nothing_behind_lose_punctuation_and_refuse_text(name: str) -> None:
    framing = MODELS[name](None)
    found = encoded(question([Part("ab")], [Part(" ."), Part("。")]), framing)
    assert found.texts[0] == (tuple(LETTERS.encode("ab")), ())
    with pytest.raises(UserError, match=r"rows.jsonl:1: '. Text' stands after the gap, which this kind of model"):
        encoded(question([Part("ab")], [Part("."), Part(" Text")]), framing)


REFUSED = [
    ("boolq", 4, SUM, "gpt2", "pattern 4 of boolq has text after the gap, .*; use `pattern` 0 or 1 or 2 or 3"),
    ("rte", None, SUM, "t5", "pattern 0 of rte has text after the gap, .*; use `pattern` 4"),
    ("ag_news", 0, SUM, "gpt2", "pattern 0 of ag_news has text after the gap, .*; use `pattern` 3"),
    (
        "copa",
        0,
        RESTRICTED_LOGITS,
        "glm",
        "pattern 0 of copa has candidates of several tokens; use `candidate_scoring` sum",
    ),
    (
        "boolq",
        0,
        RESTRICTED_LOGITS,
        "glm",
        r"pattern 0 of boolq: the word ' No' is not a token of this tokenizer, which reads 2 tokens \('<38>', '<21>'\)",
    ),
    ("boolq", 0, "summ", "glm", "boolq: candidate scoring 'summ'; did you mean 'sum'"),
]


@pytest.mark.parametrize(("name", "pattern", "scoring", "model", "message"), REFUSED)
def test_what_cannot_be_asked_is_refused_before_a_row_is_read(name, pattern, scoring, model, message) -> None:
    with pytest.raises(UserError, match=message):
        check_cloze(load_cloze(name), pattern, scoring, MODELS[model](None), LETTERS)


def test_words_that_are_the_same_token_are_refused(tmp_path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("patterns: [{text: '{a}{gap}', words: {0: 'n', 1: ' n'}}]")
    with pytest.raises(UserError, match="the words 'n' and ' n' are the same token"):
        check_cloze(load_cloze(str(file)), None, RESTRICTED_LOGITS, MODELS["gpt2"](None), LETTERS)
    file.write_text("patterns: [{text: '{a}{gap}', words: {0: 'n', 1: 'y'}}]")
    check_cloze(load_cloze(str(file)), None, RESTRICTED_LOGITS, MODELS["gpt2"](None), LETTERS)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_each_candidate_alone(name: str, scoring: str) -> None:
    model = build_model(name, **SHAPE).eval()
    framing = MODELS[name](model.config)
    candidates = ("n", "y", "z") if scoring == RESTRICTED_LOGITS else (" no", " yes!", " it")
    own = (Text((Part("ab"),), ()), Text((Part("cd"),), ()), Text((Part("ab"),), ()))
    shared = question([Part("abc", True)], [Part(".")], candidates)
    apart = ClozeQuestion(own, candidates, (0, 1, 2), (1,), None, 1, None, (), "rows.jsonl:2")
    several = encode_questions([shared, apart], framing, LETTERS, scoring=scoring, end=True, seq_length=40)
    assert [len({*one.texts}) for one in several] == [1, 2]
    told: list[int] = []
    found = score_questions(model, framing, several, told.append)
    assert sum(told) == 3
    for one, scores in zip(several, found, strict=True):
        for number, result in enumerate(scores):
            request = Request(framing.ask(*one.texts[number]))
            ((alone,),) = score(model, framing, [request], [[framing.continuation(one.answers[number])]])
            sizes = {MEAN: len(one.answers[number]), PER_CHARACTER: len(candidates[number].strip())}
            assert result.logprob == pytest.approx(sum(alone.logprobs), rel=1e-5)
            assert result.score == pytest.approx(sum(alone.logprobs) / sizes.get(scoring, 1), rel=1e-5)
            assert result.is_greedy == alone.is_greedy


def test_few_questions_are_in_memory_together(monkeypatch) -> None:
    model = build_model("gpt2", **SHAPE).eval()
    framing, sizes = MODELS["gpt2"](model.config), []
    questions = [question([Part("abcdefg"[:end])], [Part(".")]) for end in (1, 5, 2, 4, 3)]
    encoded = encode_questions(questions, framing, LETTERS, scoring=SUM, end=True, seq_length=40)
    expected = score_questions(model, framing, encoded)

    def counting(model: Any, framing: Any, requests: Any, *others: Any) -> Any:
        sizes.append(len(requests))
        return score(model, framing, requests, *others)

    monkeypatch.setattr("ftk.generation.engine.scoring.score", counting)
    monkeypatch.setattr("ftk.generation.questions.AT_ONCE", 2)
    found = score_questions(model, framing, encoded)
    assert sizes == [2, 2, 1]
    assert [[one.score for one in scores] for scores in found] == [
        pytest.approx([one.score for one in scores], rel=1e-5) for scores in expected
    ]


def test_the_best_candidate_is_chosen_and_an_only_one_if_the_model_would_write_it() -> None:
    scores = [CandidateScore(value, value, False) for value in (-3.0, -1.0, -1.0)]
    assert chosen(scores) == 1
    assert [chosen([CandidateScore(-1.0, -1.0, greedy)]) for greedy in (False, True)] == [None, 0]


PUBLISHED = [
    ("boolq", "bert_wordpiece", "bert-base-uncased-vocab.txt", ["no", "yes"]),
    ("boolq", "gpt2_bpe", "", ["ĠNo", "ĠYes"]),
    ("boolq", "sentencepiece", "cog-pretrain.model", None),
    ("afqmc", "sentencepiece", "cog-pretrain.model", ["▁不是", "▁是"]),
    ("cluewsc", "sentencepiece", "cog-pretrain.model", ["不是", "是"]),
    ("tnews", "sentencepiece", "cog-pretrain.model", [*load_cloze("tnews").patterns[0].words.values()]),  # type: ignore[union-attr]
]


@pytest.mark.parametrize(("name", "kind", "path", "expected"), PUBLISHED)
def test_words_are_the_tokens_of_published_vocabularies(name, kind, path, expected, test_data) -> None:
    place = test_data / "tokenizers" / path
    if not place.exists():
        pytest.skip(f"{place} is missing")
    tokenizer = build_tokenizer(kind, path=place, special_tokens="glm")
    cloze, framing = load_cloze(name), BlankFraming(tokenizer.special)
    if expected is None:
        with pytest.raises(UserError, match=r"the word ' Yes' is not a token of .* 2 tokens \('▁Y', 'es'\); use"):
            check_cloze(cloze, None, RESTRICTED_LOGITS, framing, tokenizer)
        return
    check_cloze(cloze, None, RESTRICTED_LOGITS, framing, tokenizer)
    words = tuple(cloze.patterns[cloze.pattern].words.values())
    found = encode_questions(
        [question([], [], words)], framing, tokenizer, scoring=RESTRICTED_LOGITS, end=False, seq_length=64
    )
    assert [tokenizer.token_text(token) for (token,) in found[0].answers] == expected


CHINESE = {"afqmc", "cluewsc", "tnews"}


@pytest.mark.parametrize(("kind", "path"), dict.fromkeys(row[1:3] for row in PUBLISHED), ids=str)
def test_words_of_every_pattern_are_tokens_of_the_vocabularies_of_its_language(kind, path, test_data) -> None:
    tokenizer = build_tokenizer(kind, path=test_data / "tokenizers" / path, special_tokens="glm")
    framing, names = (
        BlankFraming(tokenizer.special),
        CHINESE if path == "cog-pretrain.model" else {*cloze_names()} - CHINESE,
    )
    of_words = [one for one in map(load_cloze, sorted(names)) if one.scoring == RESTRICTED_LOGITS]
    for cloze, number in ((one, number) for one in of_words for number in one.patterns):
        check_cloze(cloze, number, RESTRICTED_LOGITS, framing, tokenizer)
    assert len(of_words) == (3 if path == "cog-pretrain.model" else 17)
