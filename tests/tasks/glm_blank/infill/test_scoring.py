"""Scores of given answers equal the model's own uncached forward, the training loss, and what generation reports."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.errors import UserError
from ftk.generation.engine import scoring
from ftk.tasks.glm_blank import BlankFiller, BlankGenerator
from ftk.tasks.glm_blank.infill.questions import question_of
from ftk.tasks.glm_blank.infill.scoring import encode_answers
from ftk.tasks.glm_blank.samples.infilling import build_sample
from tests.dense import batch_of
from tests.generation.slow import SPECIAL, next_logprobs, small_model
from tests.tasks.glm_blank.infill.test_fill import own_tokenizer, tokenizer  # noqa: F401

CONTEXTS = [
    [6, 7, 3, 8, 9, 10, 11],
    [3],
    [6, 3, 7, 4, 8, 5],
    [9, 9, 8, 7, 4, 6, 12, 13, 14, 15, 16, 17, 3, 18],
    [6, 7],
]


def answers_for(context, seed, longest=5):
    chance = random.Random(seed)
    blanks = sum(token in (3, 4, 5) for token in context)
    return [[chance.randrange(6, 20) for _ in range(chance.randrange(longest + 1))] for _ in range(blanks)]


def slow_score(model, context, answers, order=None, end=True):
    """Every token's log-probability, with the whole sequence read anew for it."""
    blanks = [index for index, token in enumerate(context) if token in (3, 4, 5)]
    filled, found = [], {}
    for number in order or range(len(blanks)):
        answer = answers[number]
        wanted = [*answer, SPECIAL.eop] if end else answer
        found[number] = [
            float(next_logprobs(model, context, filled, blanks[number], wanted[:step])[token])
            for step, token in enumerate(wanted)
        ]
        filled.append((blanks[number], answer))
    return [found[number] for number in range(len(blanks))]


def assert_same(scored, expected):
    assert len(scored) == len(expected)
    for answer, values in zip(scored, expected, strict=True):
        np.testing.assert_allclose(answer.token_logprobs, values, rtol=0, atol=2e-5)
        assert answer.score == pytest.approx(sum(values) / max(len(values), 1), abs=2e-5)


@pytest.mark.parametrize("block_positions", [True, False])
@pytest.mark.parametrize("end", [True, False])
def test_many_candidates_of_many_contexts_equal_the_uncached_forward(block_positions, end):
    model = small_model(block_positions=block_positions)
    candidates = [[answers_for(context, seed) for seed in range(5)] for context in CONTEXTS]
    scored = BlankGenerator(model, SPECIAL).score(CONTEXTS, candidates, end=end)
    for context, own, found in zip(CONTEXTS, candidates, scored, strict=True):
        for answers, one in zip(own, found, strict=True):
            assert [answer.tokens for answer in one] == answers
            assert_same(one, slow_score(model, context, answers, end=end))


def test_the_order_of_the_blanks_is_that_which_is_given():
    model = small_model()
    context, answers = CONTEXTS[2], [[6, 7], [], [9, 8, 7]]
    generator = BlankGenerator(model, SPECIAL)
    for order in ([2, 0, 1], [1, 2, 0]):
        (((*found,),),) = generator.score([context], [[answers]], orders=[order])
        assert_same(found, slow_score(model, context, answers, order))
    with pytest.raises(UserError, match="order .0, 0, 1. is not one of all 3 blanks"):
        generator.score([context], [[answers]], orders=[[0, 0, 1]])


def test_rows_and_batches_do_not_matter(monkeypatch):
    generator = BlankGenerator(small_model(), SPECIAL)
    candidates = [[answers_for(context, seed) for seed in range(7)] for context in CONTEXTS]
    together = generator.score(CONTEXTS, candidates)
    monkeypatch.setattr(scoring, "MAX_TOKENS", 1)
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 2)
    for context, own, found in zip(CONTEXTS, candidates, together, strict=True):
        for answers, one in zip(own, found, strict=True):
            (((*alone,),),) = generator.score([context], [[answers]])
            assert_same(alone, [answer.token_logprobs for answer in one])


def test_candidates_share_rows_while_they_are_shorter_than_the_context(monkeypatch):
    generator = BlankGenerator(small_model(), SPECIAL)
    rows = []
    monkeypatch.setattr(scoring, "_batches", lambda given, max_tokens: rows.extend(given) or [given] if given else [])
    context = [*range(6, 15), 3, 9, 9]
    generator.score([context], [[[[7, 8]]] * 9])
    assert [len(row.branches) for row in rows] == [4, 4, 1]  # 12 tokens of context, 3 of each candidate


def test_what_was_generated_scores_as_it_was_reported():
    model = small_model(seed=3)
    generator = BlankGenerator(model, SPECIAL, max_len=6, beam=3, nbest=3)
    contexts = CONTEXTS[:4]
    generated = generator.fill_ids(contexts)
    for context, answers in zip(contexts, generated, strict=True):
        given = [answer.tokens + ([2] if answer.ended else []) for answer in answers]
        (((*found,),),) = generator.score([context], [[given]], end=False)
        for one, answer in zip(found, answers, strict=True):
            np.testing.assert_allclose(one.token_logprobs, answer.token_logprobs, rtol=0, atol=2e-5)
            assert one.score == pytest.approx(answer.score, abs=2e-5)


@pytest.mark.parametrize(
    ("objective", "spans", "order", "append_end"),
    [
        ("token", [[2, 4], [5, 6], [9, 13]], [1, 2, 0], True),
        ("sentence", [[0, 3], [3, 7]], [1, 0], True),
        ("document", [[6, 15]], [0], True),
        ("document", [[6, 15]], [0], False),
        ("document", [[6, 16]], [0], False),
    ],
)
def test_the_training_loss_is_the_sum_of_the_scores(objective, spans, order, append_end):
    special = SimpleNamespace(**vars(SPECIAL), eos=19, cls=None)
    model = small_model()
    document = [*range(6, 18), 7, 9, 8, 19]
    emitted = [spans[number] for number in order]
    sample = build_sample(document, spans, emitted, objective, special=special, append_end=append_end)
    question = question_of(vars(sample), special)
    names = ("tokens", "targets", "loss_mask", "position_ids", "context_length")
    batch = batch_of({name: torch.as_tensor(getattr(sample, name))[None] for name in names})
    output = CrossEntropy(CrossEntropyConfig())(model, batch)
    (((*found,),),) = BlankGenerator(model, special).score(
        [question.context], [[question.training_targets(special.eop)]], orders=[question.order], end=False
    )
    assert sum(len(answer.token_logprobs) for answer in found) == int(output.num_targets)
    assert -sum(sum(answer.token_logprobs) for answer in found) == pytest.approx(float(output.loss.detach()), rel=1e-5)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([[6], [7]], "2 answers for 1 blanks"),
        ([[6, 2, 7]], "blank 1 holds an end token before its end"),
        ([[6] * 64], "64 tokens long, but the model has positions for 63"),
    ],
)
def test_answers_that_do_not_fit_are_named(answers, message):
    with pytest.raises(UserError, match=message):
        BlankGenerator(small_model(), SPECIAL).score([[6, 3]], [[answers]])


def test_the_longest_answer_that_fits_is_scored_and_a_longer_context_is_refused():
    model = small_model()
    generator = BlankGenerator(model, SPECIAL)
    (((found,),),) = generator.score([[6, 3]], [[[[7] * 63]]])
    assert_same([found], slow_score(model, [6, 3], [[7] * 63]))
    with pytest.raises(UserError, match="66 tokens long, but the model has positions for 65"):
        generator.score([[6] * 65 + [3]], [[[[7]]]])


@pytest.fixture
def filler(tokenizer):  # noqa: F811
    model = small_model(vocab_size=tokenizer.padded_vocab_size())
    return BlankFiller(tokenizer, BlankGenerator(model, tokenizer.special))


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("the quick [MASK] jumps", "brown fox"),
        ("[MASK] fills blanks", "she"),
        ("trained on a (text[MASK]", "s) ."),
        ("the quick [gMASK]", "  brown fox "),
    ],
)
def test_an_answer_is_spelled_as_in_the_whole_text(filler, prompt, answer):
    encoded = filler.encode(prompt)
    (ids,) = encode_answers(filler.tokenizer, encoded.pieces, [answer])
    before = filler.tokenizer.encode(encoded.pieces[0].rstrip())
    whole = filler.tokenizer.encode(" ".join(prompt.replace("[MASK]", answer).replace("[gMASK]", answer).split()))
    if whole[: len(before)] == before:  # the tokenizer has not joined them
        assert whole[len(before) :][: len(ids)] == ids
    assert filler.tokenizer.decode(ids).replace(" ", "") == answer.replace(" ", "")


def test_texts_are_scored_as_their_ids(filler):
    prompts = ["the quick [MASK] jumps [sMASK] .", "she fills"]
    texts = [["brown fox", "over"], ["blanks"]]
    scored = filler.score(prompts, texts)
    for prompt, own, found in zip(prompts, texts, scored, strict=True):
        encoded = filler.encode(prompt)
        (((*expected,),),) = filler.generator.score(
            [encoded.context], [[encode_answers(filler.tokenizer, encoded.pieces, own)]]
        )
        assert [one.text for one in found] == own
        for one, answer in zip(found, expected, strict=True):
            assert (one.tokens, one.score) == (answer.tokens, pytest.approx(answer.score, abs=2e-5))
            assert one.logprob == pytest.approx(sum(answer.token_logprobs), abs=1e-4)
            assert len(one.token_logprobs) == len(one.tokens) + 1
    assert [one.named["blank"] for one in scored[0]] == [
        filler.tokenizer.token_text(i) for i in find_masks(filler, prompts[0])
    ]


def test_one_text_or_context_gives_one_result_and_a_list_a_list(filler):
    prompt, generator = "the [MASK] fox [MASK] .", filler.generator
    ids = filler.encode(prompt).context
    assert [filler.fill(prompt)] == filler.fill([prompt])
    assert [filler.score(prompt, ["a", "b"])] == filler.score([prompt], [["a", "b"]])
    assert [filler.score_candidates(prompt, [["a", "b"]])] == filler.score_candidates([prompt], [[["a", "b"]]])
    assert [generator.fill_ids(ids, seeds=3)] == generator.fill_ids([ids], seeds=[3])
    assert [generator.score(ids, [[[7], [8]]])] == generator.score([ids], [[[[7], [8]]]])
    assert list(generator.stream_ids(ids)) == list(generator.stream_ids([ids]))


def find_masks(filler, prompt):
    return [token for token in filler.encode(prompt).context if token in filler.generator.framing.masks]


def test_wrong_numbers_of_answers_name_the_prompt(filler):
    with pytest.raises(UserError, match="prompt 2: 1 answers for 2 blanks; give one for each"):
        filler.score(["the [MASK]", "[MASK] the [MASK]"], [["fox"], ["fox"]])
    with pytest.raises(UserError, match=r"a list of answers; write score\(prompt, \[answer\]\)"):
        filler.score(["the [MASK]"], ["fox"])
    with pytest.raises(UserError, match=r"one for each blank; write \['fox'\]"):
        filler.score_candidates(["the [MASK]"], [["fox"]])
    with pytest.raises(UserError, match="an answer is a text, but this is list"):
        filler.score("the [MASK]", [["fox"]])
    with pytest.raises(UserError, match="answers for 1 prompts, but there are 2"):
        filler.score(["the [MASK]", "she"], [["fox"]])
