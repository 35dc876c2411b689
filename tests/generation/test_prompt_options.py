"""Prompts with options of their own give, together, the answers that each gives alone with these options for all."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import ftk
from ftk.errors import UserError
from ftk.generation.processors import ProcessorConfig, Processors, build_processors
from ftk.generation.processors import steering as steerings
from ftk.generation.processors.base import Processor
from ftk.generation.processors.per_request import PerRequest
from ftk.generation.processors.steering import PROMPT_OPTIONS, Steering
from ftk.tasks.glm_blank import BlankGenerator
from ftk.tasks.glm_blank.infill.blanks import end_ids
from ftk.tasks.glm_blank.infill.fill import BlankFiller
from tests.generation.slow import SPECIAL, small_model

STRATEGIES = {
    "greedy": {},
    "beam": {"beam": 4, "nbest": 2},
    "diverse_beam": {"search": "diverse_beam", "beam": 4},
    "sampling": {"sampling": True, "top_k": 50, "nbest": 2},
    "beam_sampling": {"search": "beam_sampling", "beam": 3},
    "confident": {"beam": 3, "blank_order": "confident"},
    "reencode": {"reencode": True},
    "joint": {"beam": 3, "nbest": 2, "nbest_over": "text"},
}
PROMPTS: list[tuple[str, dict | None]] = [
    ("the [MASK] fox jumps [MASK]", None),
    ("the [MASK] fox jumps [MASK]", {"constraints": ["dog"]}),
    ("the [MASK] fox jumps [MASK]", {"constraints": ["dog", "she"], "constraint_answers": [2, 1]}),
    ("over a lazy [MASK] while", {"prefix": "old"}),
    ("she reads [MASK]", {"forbid_words": ["e", "the"], "min_len": 3}),
    ("over a lazy [MASK] while", {"max_len": 2}),
    ("the [MASK] fox jumps [MASK]", {"prefix": ["", "she"], "max_lens": [4, 6], "repetition_penalty": 1.5}),
    ("the quick [MASK]", {"constraints": ["dog"]}),
    ("she reads [MASK]", {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": ["40=3", "41=-2.5"]}),
    ("in silent [MASK] .", {"seed": 2**63 - 1, "no_repeat_ngram_size": 1}),
    ("in silent [MASK] .", {"seed": None, "stop": ["e", "o"]}),
    ("the [MASK] fox jumps [MASK]", {"stop_token_ids": [*range(40, 60)], "min_len": 5}),
    ("in silent [MASK] .", None),
]


@pytest.fixture(scope="module")
def made(place):
    """made(**options) -> filler; the model is loaded once."""
    model, tokenizer = ftk.load_model(place / "run"), ftk.load_tokenizer(place / "run")

    def make(processors=None, **options):
        config = ProcessorConfig(**(processors or {}))
        steering = Steering(config, tokenizer, ends=end_ids(tokenizer.special), min_len=0, max_len=12)
        generator = BlankGenerator(
            model, tokenizer.special, max_len=12, processors=steering.processors, batch_size=4, **options
        )
        return BlankFiller(tokenizer, generator, steering)

    return make


@pytest.mark.parametrize("name", STRATEGIES)
def test_together_the_answers_are_those_of_each_prompt_alone(made, name):
    """Alone, the options are the generator's own, and no other prompt is there."""
    found = made(**STRATEGIES[name]).fill([p for p, _ in PROMPTS], options=[own for _, own in PROMPTS])
    for (prompt, own), together in zip(PROMPTS, found, strict=True):
        own = {key: value for key, value in (own or {}).items() if value is not None}
        seed, limit = own.pop("seed", 1), own.pop("max_len", None)
        blanks = prompt.count("[MASK]")
        if "min_len" in own:
            own["min_lens"] = [own.pop("min_len")] * blanks
        if limit is not None:
            own["max_lens"] = [limit] * blanks
        if isinstance(own.get("prefix"), str):
            own["prefix"] = [own["prefix"]]
        (alone,) = made(own, **STRATEGIES[name]).fill([prompt], seeds=[seed])
        assert together.text == alone.text
        for one, other in zip(together.answers, alone.answers, strict=True):
            assert [a.tokens for a in (one, *one.others)] == [a.tokens for a in (other, *other.others)]
            np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"beam": 3}, {"sampling": True}])
def test_they_hold_for_every_answer(made, options):
    filler = made({"forbid_words": ["fox"]}, **options)
    prompts = ["the [MASK]", "the [MASK] fox [MASK] .", "she reads [MASK]", "a [MASK]"]
    own = [{"constraints": ["dog"]}, {"prefix": ["", "old"]}, None, {"max_len": 3, "forbid_words": []}]
    first, second, third, fourth = filler.fill(prompts, options=own)
    assert "dog" in first.answers[0].text
    assert second.answers[1].text.startswith("old")
    assert all("fox" not in answer.text for answer in (*first.answers, *second.answers, *third.answers))
    assert len(fourth.answers[0].tokens) <= 3


def test_pieces_that_are_streamed_are_cut_at_the_prompts_own_stop_text(made):
    filler = made()
    (plain,) = filler.fill(["in silent [MASK] ."], options=[{"min_len": 6}])
    stop = max(plain.answers[0].text[2:].split(), key=len)[:2]
    told = []
    own = [{"min_len": 6, "stop": stop}, {"min_len": 6}]
    results = filler.fill(["in silent [MASK] ."] * 2, on_piece=told.append, options=own)
    for number, result in enumerate(results):
        assert "".join(piece.text for piece in told if piece.prompt == number) == result.answers[0].text
    assert results[1].text == plain.text
    assert stop not in results[0].answers[0].text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"constraint": ["a"]}, "a prompt has no option 'constraint'; did you mean 'constraints'"),
        ({"forbid_words_file": "/etc/passwd"}, "has no option 'forbid_words_file'"),
        ({"beam": 3}, "has no option 'beam'"),
        ({"constraints": [["a"]]}, "constraints is ['a']; it must be a list, each item a text"),
        ({"max_lens": "two"}, "max_lens is 'two'; it must be a list, each item a whole number"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"max_len": 13}, "max_len is 13; for a single prompt it can be from 1 to 12"),
        ({"max_len": 0}, "max_len is 0; for a single prompt it can be from 1 to 12"),
        ({"min_len": 5, "max_len": 4}, "answer 1: min_lens 5 is above max_lens 4"),
        ({"constraints": ["dog"], "forbid_words": ["dog"]}, "'dog' in it is forbidden"),
        ({"constraints": ["dog"], "max_len": 1}, "tokens, but answer 1 has room for 1"),
        ({"prefix": ["a", "b"]}, "prefix has 2 entries, but the prompt asks for 1 answer"),
        ({"constraints": ["dog"], "constraint_answers": [2]}, "names answer 2, but the prompt asks for 1 answer"),
        ({"ordered_constraints": True}, "ordered_constraints needs constraints"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1.0"),
    ],
)
def test_what_is_wrong_with_them_is_said(made, options, message):
    with pytest.raises(UserError) as error:
        made().fill(["the [MASK] fox"], options=[options])
    assert message in str(error.value)


def test_options_need_a_filler_that_can_make_processors_and_one_for_each_prompt(made):
    filler = made()
    with pytest.raises(UserError, match="2 prompts, 2 seeds, 1 options"):
        filler.fill(["a", "b"], options=[None])
    bare = BlankFiller(filler.tokenizer, filler.generator)
    with pytest.raises(UserError, match="without steering"):
        bare.fill(["a"], options=[{"max_len": 2}])
    with pytest.raises(UserError, match="a call has options of its own, but its generator was made without steering"):
        bare.fill("a", max_len=2)
    assert bare.fill(["a"], options=[None])[0].text == filler.fill(["a"])[0].text


def test_prompts_with_the_same_options_share_their_processors(made):
    filler = made()
    same = [
        filler.encode("the [MASK]", options={"constraints": ["dog"], "seed": n}).request.processors for n in range(3)
    ]
    assert same[0] is same[1] is same[2]
    assert filler.encode("the [MASK]", options={"seed": 2}).request.processors is filler.generator.processors
    assert filler.encode("the [MASK]", options={"constraints": ["she"]}).request.processors is not same[0]
    for number in range(400):
        filler.encode("the [MASK]", options={"repetition_penalty": 1 + number})
    assert len(filler.steering._known) <= 256


def test_processors_are_made_anew_only_where_a_call_changes_them(made, tmp_path):
    steering = made({"forbid_words": ["fox"]}).steering
    assert steering.changed(0, 5).processors is steering.processors
    assert steering.changed(0, 5, stop="a") is steering.changed(0, 5, stop=["a"])
    assert steering.changed(0, 5, stop="a") is not steering.changed(0, 6, stop="a")
    with pytest.raises(UserError, match="answer has room for 1"):
        made({"constraints": ["dog"]}).steering.changed(0, 1)
    (tmp_path / "words").write_text("fox\n")
    steering.changed(0, 5, forbid_words_file=tmp_path / "words")
    (tmp_path / "words").unlink()
    with pytest.raises(UserError, match="words: No such file"):
        steering.changed(0, 5, forbid_words_file=tmp_path / "words")


def test_threads_may_ask_for_processors_while_others_are_forgotten(made, monkeypatch):
    steering = made().steering
    monkeypatch.setattr(steerings, "_REMEMBERED", 1)
    monkeypatch.setattr(steering, "_build", lambda config: Processors())
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: steering.of({"repetition_penalty": 1 + n % 3}, 1), range(2000)))
    finally:
        sys.setswitchinterval(before)


def test_all_steering_options_but_files_can_be_a_prompts_own():
    names = {name for name in ProcessorConfig.__dataclass_fields__ if name not in ("forbid_words_file", "guide_file")}
    assert set(PROMPT_OPTIONS) == names | {"min_len", "max_len", "seed"}


class Follows(Processor):
    """Keeps the tokens of each hypothesis by itself, and compares them with what the search says."""

    def __init__(self, forbidden):
        self.forbidden = forbidden
        self.tokens = None

    def __call__(self, state, scores):
        if state.step:
            assert torch.equal(self.tokens[:, :, : state.step], state.tokens)
        self.scores = scores
        scores[..., self.forbidden] = float("-inf")
        return scores

    def reorder(self, sources):
        self.sources = sources

    def keep(self, rows):
        self.kept = rows.tolist()


def test_each_of_them_sees_its_own_prompts_and_no_others():
    shared, other = Processors([Follows(1)]), Processors([Follows(2)])
    both = PerRequest([shared, other, shared, Processors()])
    # They keep something, so that each request has its own, which can fail alone.
    assert len({id(one) for one in (*both.own, shared)}) == 5
    (mine,), (its,), (third,), () = (one.items for one in both.own)
    both.reorder(torch.arange(8).reshape(4, 2))
    assert [one.sources.tolist() for one in (mine, its, third)] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    both.keep_requests([2, 3], torch.device("cpu"))
    assert third.kept == [0]
    assert not hasattr(its, "kept")
    assert both.own[0].items == (third,)
    assert len(both.own) == 2
    assert both
    assert not PerRequest([Processors(), Processors()])


def test_a_beam_with_constraints_beside_one_without_chooses_as_alone():
    """`select`: banks for the one, the best by score for the other."""
    model = small_model()
    contexts = [[7, 8, 3, 9]] * 3

    class Constrained(Processor):
        def __call__(self, state, scores):
            return scores

        def select(self, totals, width, count):
            return [[int(row.flatten().argmin()), *row.flatten().topk(count).indices.tolist()] for row in totals]

    own = [None, Processors([Constrained()]), None]
    generator = BlankGenerator(model, SPECIAL, beam=3, nbest=3, max_len=5)
    mixed = generator.fill_ids(contexts, processors=own)
    plain = generator.fill_ids(contexts[:1])[0]
    assert mixed[0] == mixed[2]
    assert [one.tokens for one in (mixed[0][0], *mixed[0][0].others)] == [
        one.tokens for one in (plain[0], *plain[0].others)
    ]
    constrained = generator.fill_ids(contexts[:1], processors=own[1:2])[0]
    assert constrained[0].tokens == mixed[1][0].tokens


def test_building_them_does_not_change_those_of_all(made):
    filler = made({"forbid_words": ["fox"]})
    before = filler.fill(["the [MASK]"])
    filler.fill(["the [MASK]"], options=[{"constraints": ["dog"]}])
    assert filler.fill(["the [MASK]"]) == before
    assert (
        build_processors(None, filler.tokenizer, ends=filler.generator.framing.ends, max_len=12)
        is not filler.generator.processors
    )
