"""BlankGenerator against the original and the uncached model, batches against their members, and its limits."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch

from ftk.errors import UserError
from ftk.generation.search import strategy
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation import slow
from tests.generation.slow import SPECIAL, small_model
from tests.golden_glm import GOLDEN, read_model

CONTEXTS = [
    [7, 8, 3, 9, 10],
    [11, 3, 12, 4, 13, 14, 15, 5],
    [3],
    [6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 3, 16, 17],
    [3, 3, 3, 3],
    [19, 18, 17, 4, 16],
]


@pytest.fixture(scope="module")
def model():
    return small_model()


def random_contexts(seed, count):
    rng = random.Random(seed)
    contexts = []
    for _ in range(count):
        context = [rng.randrange(6, 20) for _ in range(rng.randrange(1, 24))]
        for index in rng.sample(range(len(context)), k=min(len(context), rng.randrange(1, 5))):
            context[index] = rng.choice(slow.BLANKS)
        contexts.append(context)
    return contexts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_positions": False},
        {"num_layers": 1, "num_attention_heads": 4},
        {"name": "chatglm"},  # rotated by two positions
        {"name": "glm130b", "block_positions": False, "gmask_runs_on": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("max_len", [1, 2, 7])
def test_cached_greedy_equals_the_uncached_model(options, max_len):
    model = small_model(**options)
    contexts = CONTEXTS + random_contexts(1, 10)
    for context, answers in zip(
        contexts, BlankGenerator(model, SPECIAL, max_len=max_len).fill_ids(contexts), strict=True
    ):
        slow.assert_answers(answers, slow.greedy(model, context, max_len), 1e-4)


@pytest.mark.parametrize("at_once", [1, 100])
def test_greedy_answers_are_what_the_original_computed(at_once):
    filled = json.loads((GOLDEN / "greedy_fill.json").read_text())
    special = SimpleNamespace(sop=filled["sop"], eop=filled["eop"], mask=filled["mask"])
    generator = BlankGenerator(read_model().eval(), special, beam=1, max_len=filled["max_len"])
    for start in range(0, len(filled["cases"]), at_once):
        cases = filled["cases"][start : start + at_once]
        for answers, case in zip(generator.fill_ids([case["context"] for case in cases]), cases, strict=True):
            expected = [*zip(case["answers"], case["token_logprobs"], strict=True)]
            slow.assert_answers(answers, expected, 1e-4)


def test_answers_of_random_weights_end_at_once_in_the_middle_and_never():
    """The comparison above has met every way in which an answer can end."""
    lengths = set()
    for seed in range(3):
        generator = BlankGenerator(small_model(seed=seed), SPECIAL, max_len=7)
        lengths |= {(len(a.tokens), a.ended) for row in generator.fill_ids(random_contexts(seed, 40)) for a in row}
    assert (0, True) in lengths
    assert (7, False) in lengths
    assert any(0 < length < 7 and ended for length, ended in lengths)


def test_every_context_token_goes_through_the_model_once(model, monkeypatch):
    read = []
    embed = type(model).embed
    monkeypatch.setattr(
        type(model),
        "embed",
        lambda self, tokens, **inputs: read.append(tokens.numel()) or embed(self, tokens, **inputs),
    )
    context = [7, 3, 8, 4, *range(6, 20), 5]
    (answers,) = BlankGenerator(model, SPECIAL, max_len=5, min_len=5).fill_ids([context])
    steps = 4  # of the 5 tokens of an answer the last is never fed while it is searched
    later = [1 + len(answer.tokens) for answer in answers[:-1]]  # a filled answer and the next start token
    assert read == [len(context) + 1, *[1] * steps, later[0], *[1] * steps, later[1], *[1] * steps]


@pytest.mark.parametrize(
    ("options", "num_blanks"),
    [({}, 1), ({}, 200), ({"beam": 3}, 30), ({"blank_order": "2,1"}, 8)],
)
def test_a_batch_of_prompts_is_read_in_one_forward_however_many_blanks_there_are(monkeypatch, options, num_blanks):
    model, read = small_model(max_positions=600), []
    embed = type(model).embed
    monkeypatch.setattr(
        type(model),
        "embed",
        lambda self, tokens, **inputs: read.append(tokens.shape) or embed(self, tokens, **inputs),
    )
    contexts = [[*[6, 3] * num_blanks, *range(6, 6 + more)] for more in (0, 5, 11)]  # of three lengths
    generator = BlankGenerator(model, SPECIAL, max_len=2, min_len=2, **options)
    assert all(len(answers) == num_blanks for answers in generator.fill_ids(contexts))
    assert read[0] == (1, sum(len(context) + 1 for context in contexts))  # each with a start token; nothing is padding
    # All else is steps of one token a hypothesis, and between two blanks an answer with the next start token.
    assert all(shape in ((3, strategy(generator.config).width), (1, 3 * 3)) for shape in read[1:])
    assert sum(shape == (1, 3 * 3) for shape in read[1:]) >= num_blanks - 1


@pytest.mark.parametrize("min_len", [1, 3])
def test_min_len_forbids_an_early_end_and_keeps_the_models_log_probabilities(model, min_len):
    generator = BlankGenerator(model, SPECIAL, max_len=4, min_len=min_len)
    for context, answers in zip(CONTEXTS, generator.fill_ids(CONTEXTS), strict=True):
        slow.assert_answers(answers, slow.greedy(model, context, 4, min_len=min_len), 1e-4)
        assert all(len(answer.tokens) >= min_len for answer in answers)


def test_the_end_of_text_token_ends_an_answer_where_there_is_one(model):
    contexts = random_contexts(3, 30)
    plain = BlankGenerator(model, SPECIAL, max_len=5).fill_ids(contexts)
    eos = next(answer.tokens[2] for row in plain for answer in row if len(answer.tokens) == 5)
    special = SimpleNamespace(**vars(SPECIAL), eos=eos)
    answers = BlankGenerator(model, special, max_len=5).fill_ids(contexts)
    for context, row in zip(contexts, answers, strict=True):
        slow.assert_answers(row, slow.greedy(model, context, 5, ends=(2, eos)), 1e-4)


def test_special_tokens_may_be_any_object_with_what_is_used(model):
    (answers,) = BlankGenerator(model, SimpleNamespace(sop=1, eop=2, mask=3), max_len=3).fill_ids([[7, 3, 4]])
    assert len(answers) == 1  # 4 is no blank for it


def test_contexts_without_blanks_have_no_answers(model):
    generator = BlankGenerator(model, SPECIAL)
    assert generator.fill_ids([]) == []
    assert generator.fill_ids([[], [7, 8], [7]]) == [[], [], []]
    asked = generator.requests([[7, 3]])
    with pytest.raises(UserError, match="asks for no blank"):
        generator.engine(asked).submit(generator.requests([[7, 8]])[0])


def test_generation_runs_without_dropout_and_leaves_the_mode_alone():
    model = small_model(dropout=0.5, embedding_dropout=0.5, attention_dropout=0.5)
    expected = BlankGenerator(model, SPECIAL, max_len=5).fill_ids(CONTEXTS)
    model.train()
    assert BlankGenerator(model, SPECIAL, max_len=5).fill_ids(CONTEXTS) == expected
    assert model.training


def test_a_prompt_as_long_as_the_positions_is_answered_and_a_longer_one_refused(model):
    generator = BlankGenerator(model, SPECIAL, max_len=3)
    (answers,) = generator.fill_ids([[7] * 64 + [3]])  # max_positions 64: tables of 65 rows
    assert len(answers) == 1
    with pytest.raises(UserError, match="66 tokens long, but the model has positions for 65"):
        generator.fill_ids([[7] * 65 + [3]])


def test_answers_beyond_the_block_positions_are_refused(model):
    assert BlankGenerator(model, SPECIAL, max_len=64).fill_ids([[7, 3]])[0]
    assert BlankGenerator(model, SPECIAL, max_len=63, min_len=63).fill_ids([[7, 3, 4]])[0]
    with pytest.raises(UserError, match=r"`max_len` can be at most 64"):
        BlankGenerator(model, SPECIAL, max_len=70).fill_ids([[7, 3]])
    with pytest.raises(UserError, match=r"`max_len` can be at most 63"):
        BlankGenerator(model, SPECIAL, max_len=64).fill_ids([[7, 3, 4]])


@pytest.mark.parametrize("options", [{}, {"beam": 2}])
def test_weights_with_nan_are_an_error_not_an_answer(options):
    model = small_model()
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="NaN"):
        BlankGenerator(model, SPECIAL, **options).fill_ids([[7, 3]])


@pytest.mark.parametrize("missing", ["sop", "eop"])
def test_missing_special_tokens_are_named(model, missing):
    special = SimpleNamespace(**{name: one for name, one in vars(SPECIAL).items() if name != missing})
    with pytest.raises(UserError, match=missing):
        BlankGenerator(model, special)
    with pytest.raises(UserError, match="MASK"):
        BlankGenerator(model, SimpleNamespace(sop=1, eop=2))
