"""Which requests are refused, and what the answer says; without HTTP."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import ftk
from ftk.errors import UserError
from ftk.serving import completions, fill
from ftk.serving.fields import parsed
from ftk.serving.refusal import Refusal
from tests.serving.services import PROMPTS, causal, serving


@pytest.fixture(scope="module")
def converser(run, tmp_path_factory):
    """A causal model that was trained on conversations, with the tokenizer of the run."""
    return causal(
        tmp_path_factory.mktemp("converser"), run / "checkpoint_1" / "tokenizer", _name="sft", template="plain"
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": PROMPTS[0], "max_len": "3"}, 'max_len is "3"; it must be a whole number from 1 to 8'),
        ({"prompt": PROMPTS[0], "max_len": 9}, "max_len is 9; it must be a whole number from 1 to 8"),
        ({"prompt": PROMPTS[0], "min_len": 9}, "min_len is 9; it must be a whole number from 0 to 8"),
        ({"prompt": PROMPTS[0], "min_len": 6, "max_len": 3}, "min_len is 6; it must be from 0 to max_len 3"),
        ({"prompt": PROMPTS[0], "min_len": 5, "max_lens": [3]}, "answer 1: min_lens 5 is above max_lens 3"),
        ({"prompt": PROMPTS[0], "min_lens": [5], "max_len": 3}, "answer 1: min_lens 5 is above max_lens 3"),
        ({"prompt": PROMPTS[0], "constraints": ["letters"], "max_len": 1}, "constraints 'letters' need"),
        ({"prompt": PROMPTS[0], "prefix": ["letters"], "max_len": 1}, "prefix 'letters': it needs"),
        ({"prompt": PROMPTS[0], "nbest": 2}, "nbest is 2; it must be a whole number from 1 to 1"),
        ({"prompt": PROMPTS[0], "blank_order": "1,1"}, "blank_order is '1,1'; it names a blank twice"),
        ({"prompt": PROMPTS[0], "blank_order": [1]}, "blank_order is '[1]'; it is left, confident, or numbers"),
        ({"prompt": PROMPTS[0], "blank_order": "confident"}, "blank_order confident is for all prompts alike"),
        ({"prompt": PROMPTS[0], "sed": 3}, "unknown field 'sed'; did you mean 'seed'?"),
        ({"prompt": PROMPTS[0], "x" * 5000: 3}, f"unknown field '{'x' * 79}; there are: model"),
    ],
)
def test_a_field_that_is_not_allowed_is_named(generator, body, message):
    async def use(service):
        with pytest.raises(Refusal) as refused:
            fill.read(body, service)
        return str(refused.value)

    said = serving(generator, use)
    assert said.startswith(message)
    names = said.partition("there are: ")[2].split(", ")
    assert len({*names}) == len(names)


def test_a_limit_that_is_too_short_for_what_else_is_asked_names_that(generator, run):
    async def use(service):
        with pytest.raises(Refusal) as refused:
            fill.read({"prompt": PROMPTS[0], "min_lens": [5], "max_len": 3}, service)
        return refused.value.param

    assert serving(generator, use) == "min_lens"

    async def shortened(service):  # what the service itself wants of its answers refuses no shorter one
        prompts, _ = fill.read({"prompt": PROMPTS[0], "max_len": 3}, service)
        return [prompt.request.options.max_len for prompt in prompts]

    assert serving(ftk.load_generator(run, "cpu", max_len=8, min_lens=[5]), shortened) == [3]


@pytest.mark.parametrize("which", ["generator", "continuer"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_room_behind_a_prompt_is_the_longest_answer_that_fits(request, which, prompt):
    generator = request.getfixturevalue(which)
    asked = generator.encode(prompt, check=False).request
    room = generator.framing.room(asked)
    generator.framing.check(replace(asked, options=replace(asked.options, max_len=room)))
    with pytest.raises(UserError, match=rf"{room + 1} tokens"):
        generator.framing.check(replace(asked, options=replace(asked.options, max_len=room + 1)))


def test_the_services_own_limit_is_lowered_to_the_room_behind_a_prompt(continuer):
    texts = ("the " * count for count in itertools.count(1))
    long = next(text for text in texts if continuer.framing.room(continuer.encode(text, check=False).request) < 8)

    async def use(service):
        prompts, _ = fill.read({"prompt": [long, "the"]}, service)
        rooms = [continuer.framing.room(prompt.request) for prompt in prompts]
        with pytest.raises(Refusal, match="max_len is 8, but after this prompt the model has room for") as refused:
            fill.read({"prompt": long, "max_len": 8}, service)
        return [prompt.request.options.max_len for prompt in prompts], rooms, refused.value.code

    lengths, (short, _), code = serving(continuer, use)
    assert 0 < short < 8
    assert lengths == [short, 8]
    assert code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("which", "body", "message"),
    [
        ("continuer", {"prompt": [5] * 100, "max_tokens": 300}, "max_tokens is 300 (of which this service writes 128"),
        ("continuer", {"prompt": [5] * 100, "max_tokens": 128}, "max_tokens is 128, but after this prompt the model"),
        (
            "continuer",
            {"prompt": [5] * 129, "max_tokens": 0, "echo": True},
            "the prompt is 129 tokens long; it does not fit the model's 128 positions; shorten it",
        ),
        ("converser", {"prompt": [5]}, "this model was trained on conversations, so"),
        ("converser", {"prompt": "the", "echo": True, "logprobs": 0}, "this model was trained on conversations, so"),
    ],
)
def test_refusals_name_what_was_sent_and_what_the_model_is(request, monkeypatch, which, body, message):
    generator = request.getfixturevalue(which)
    monkeypatch.setattr(generator, "config", replace(generator.config, max_len=128))

    async def use(service):
        with pytest.raises(Refusal) as refused:
            completions.read(body, service)
        return refused.value.message

    assert serving(generator, use).startswith(message)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "the", "n": 0}, "n"),
        ({"prompt": "the", "n": True}, "n"),
        ({"prompt": "the", "temperature": "1"}, "temperature"),
        ({"prompt": "the", "temperature": 1e999}, "temperature"),
        ({"prompt": "the", "top_p": 0}, "top_p"),
        ({"prompt": "the", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "the", "frequency_penalty": 2.5}, "frequency_penalty"),
        ({"prompt": "the", "logit_bias": {"the": 1}}, "logit_bias"),
        ({"prompt": "the", "logit_bias": {"3": 101}}, "logit_bias"),
        ({"prompt": "the", "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompt": "the", "store": True}, "store"),
        ({"prompt": "the", "store": 0}, "store"),
        ({"prompt": "the", "ignore_eos": 1}, "ignore_eos"),
        ({"prompt": "the", "stop_token_ids": 3}, "stop_token_ids"),
        ({"prompt": "the", "stop_token_ids": [True]}, "stop_token_ids"),
        ({"prompt": "the", "stop_token_ids": [99999]}, "stop_token_ids"),
        ({"prompt": "the", "stop_token_ids": [3] * 17}, "stop_token_ids"),
        ({"prompt": "the", "skip_special_tokens": False}, "skip_special_tokens"),
        ({"prompt": "the", "spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"prompt": "the", "include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"prompt": "the", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "the", "length_penalty": 0.5}, "length_penalty"),
        ({"prompt": "the", "length_penalty": True}, "length_penalty"),
        ({"prompt": "the", "bad_words": ["a"]}, "bad_words"),
        ({"prompt": "the", "allowed_token_ids": [3]}, "allowed_token_ids"),
        ({"prompt": "the", "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "the", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"prompt": "the", "priority": 1}, "priority"),
        ({"prompt": "the", "request_id": 1}, "request_id"),
        ({"prompt": "the", "stream_interval": 2}, "stream_interval"),
        ({"prompt": "the", "return_token_ids": True}, "return_token_ids"),
        ({"prompt": "the", "return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"prompt": "the", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "the", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "the", "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"prompt": "the", "reasoning_effort": "high"}, "reasoning_effort"),
        ({"prompt": "the", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "the", "min_tokens": 9}, "min_tokens"),
        ({"prompt": "the", "best_of": 3}, "best_of"),
        ({"prompt": "the", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "the", "sufix": "a"}, "sufix"),
        ({"prompt": "a [MASK] b [MASK]"}, "echo"),
        ({"prompt": "the " * 300}, "prompt"),
        ({"prompt": "[mask]"}, "prompt"),
        ({"prompt": "the " * 30_000}, "prompt"),
        ({"prompt": "[MASK] " * 17, "echo": True}, "prompt"),
        ({"prompt": ["the"] * 8, "n": 8}, "n"),
        ({"prompt": "the", "temperature": 10**400}, "temperature"),
        ({"prompt": "the", "best_of": True}, "best_of"),
        ({"prompt": "the", "echo": True, "logprobs": 0}, "logprobs"),
        ({"prompt": "the", "response_format": {"type": "xml"}}, "response_format"),
        ({"prompt": "the", "response_format": {"type": "json_schema"}}, "response_format"),
        ({"prompt": "the", "response_format": "json"}, "response_format"),
        ({"prompt": "the", "guided_json": 3}, "guided_json"),
        ({"prompt": "the", "guided_choice": "yes"}, "guide"),
        ({"prompt": "the", "guided_regex": "(a"}, "guide"),
        ({"prompt": "the", "guided_grammar": "a :: b"}, "guide"),
        ({"prompt": "the", "structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"prompt": "the", "guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
    ],
)
def test_bad_completions_are_refused_with_the_field(generator, body, param):
    async def use(service):
        with pytest.raises(Refusal) as refused:
            completions.read(body, service)
        assert service.num_asked == 0
        return refused.value.status, refused.value.param

    assert serving(generator, use) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[1]",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b'"\\ud800"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
    ids=["half", "list", "nan", "twice", "surrogate", "utf16", "deep", "digits"],
)
def test_bad_json_is_refused(body):
    with pytest.raises(Refusal) as refused:
        parsed(body)
    assert refused.value.status == 400
