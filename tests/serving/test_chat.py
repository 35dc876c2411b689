"""Conversations over the service without HTTP: the tokenizer's template, choices, streams, refusals."""

from __future__ import annotations

import io
import itertools
import re
import sys
import threading
from typing import Any

import pytest
import torch

import ftk
from ftk.errors import UserError
from ftk.generation.engine.decoder import CachedDecoder
from ftk.models import build_model
from ftk.serving import chat
from ftk.serving.refusal import Refusal
from ftk_cli import interactive
from tests.byte_tokenizer import CHATML, MARKS, THINKING, byte_tokenizer
from tests.serving.services import serving
from tests.small_run import save_model

SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "<|im_end|> is a name."},
]


def make_chat_model(folder: Any, **options: Any) -> None:
    """A GPT-2 with weights of a seed, whose tokens are bytes and whose tokenizer has a chat template."""
    byte_tokenizer(folder / "files", "<|im_end|>", CHATML + THINKING).save(folder / "tokenizer")
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_positions": 256, "vocab_size": 320}
    torch.manual_seed(1)
    save_model(folder / "run" / "checkpoint_1", build_model("gpt2", **(shape | options)), folder / "tokenizer")


OF_VLLM = {
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), True),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "use_beam_search", "continue_final_message"), False),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), False),
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids"), None),
    **{"length_penalty": 1.0, "min_tokens": 0, "priority": 0, "stream_interval": 1, "request_id": "a"},
    **{"bad_words": [], "stop_token_ids": [], "chat_template_kwargs": {}},
}
"""What its clients send unasked."""


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    make_chat_model(folder)
    return ftk.load_generator(folder / "run", device="cpu", max_len=12, batch_size=2)


async def talk(service: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    asked = chat.read({"messages": SAID, **body}, service)
    return [event async for event in chat.events(asked, service)]


@pytest.mark.parametrize(
    "said", [SAID, [*SAID, {"role": "assistant", "content": ""}, SAID[1]]], ids=["words", "empty_answer"]
)
def test_the_prompt_is_the_template_around_the_messages(generator, said):
    def spelt(text: str) -> list[int]:
        return generator.tokenizer.encode(f"-{text}-")[1:-1]

    start, end = 256 + MARKS.index("<|im_start|>"), 256 + MARKS.index("<|im_end|>")
    expected = []
    for message in said:
        own = spelt(f"{message['role']}\n{message['content']}")
        expected += [start, *own, end, *spelt("\n")]
    expected += [start, *spelt("assistant\n")]
    *earlier, last = said
    assert generator.encode(last["content"], {"messages": earlier}).request.prompt == expected
    first = generator.encode("Hi.", {"messages": []}).request.prompt
    assert first[0] == start
    assert generator.encode("Hi.").request.prompt == spelt("Hi.")
    assert generator.encode("Hi.", {"messages": [], "max_len": 3}).request.prompt == first
    thought = {"messages": [], "chat_template_kwargs": {"enable_thinking": False}}
    assert generator.encode("Hi.", thought).request.prompt == [*first, *spelt("<think></think>")]
    with pytest.raises(UserError, match="`chat_template_kwargs` are for conversations; give `messages`"):
        generator.encode("Hi.", {"chat_template_kwargs": {"enable_thinking": False}})
    with pytest.raises(UserError, match=r"`chat_template_kwargs` is \[1\]; it must be an object"):
        generator.encode("Hi.", {"messages": [], "chat_template_kwargs": [1]})


def test_answers_are_those_of_the_generator_described_beside_the_loop(generator, calls_of):
    *earlier, last = SAID
    expected = generator.generate(last["content"], options={"messages": earlier}).answers[0]

    async def use(service):
        body = {"temperature": 0, "logprobs": True, "top_logprobs": 2}
        await talk(service, {**body, "stream": True})
        return await talk(service, body)

    threads = calls_of(generator.tokenizer, "decode")
    ((found,),) = (serving(generator, use),)
    assert threads
    assert threading.main_thread().name not in threads
    assert found["object"] == "chat.completion"
    assert generator.generate(last["content"], options={"messages": earlier}).text == expected.text
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    content = choice["logprobs"]["content"]
    tokens = len(expected.tokens)
    assert [one["logprob"] for one in content] == pytest.approx(expected.token_logprobs[:tokens], abs=1e-5)
    assert all(len(one["top_logprobs"]) == 2 for one in content)
    assert all(one["logprob"] == pytest.approx(one["top_logprobs"][0]["logprob"], abs=1e-5) for one in content)
    known = generator.tokenizer.token_bytes().of_ids  # of each byte; special tokens are written by their names
    assert [bytes(one["bytes"]) for one in content] == [
        known[token] or one["token"].encode() for token, one in zip(expected.tokens, content, strict=True)
    ]
    assert bytes(itertools.chain(*(one["bytes"] for one in content))).decode(errors="replace") == expected.text
    assert "".join(one["token"] for one in content) == expected.text
    assert found["usage"]["prompt_tokens"] == len(
        generator.encode(last["content"], {"messages": earlier}).request.prompt
    )
    assert found["usage"]["completion_tokens"] == len(expected.token_logprobs)


def test_a_stream_is_the_answers_in_deltas(generator):
    body = {"n": 2, "seed": 3, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2}

    async def use(service):
        streamed = await talk(service, {**body, "stream": True, "stream_options": {"include_usage": True}})
        return streamed, (await talk(service, body))[0]

    streamed, whole = serving(generator, use)
    assert {event["object"] for event in streamed} == {"chat.completion.chunk"}
    assert len({event["id"] for event in streamed}) == 1
    *chunks, last = streamed
    assert last["choices"] == []
    assert last["usage"] == {**whole["usage"], "prompt_tokens_details": {"cached_tokens": 0}}  # it came first
    assert all(event["usage"] is None for event in chunks)
    assert {event["system_fingerprint"] for event in streamed} == {whole["system_fingerprint"]}
    for choice in whole["choices"]:
        own = [event["choices"][0] for event in chunks if event["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {}
        assert own[-1]["seed"] == choice["seed"]
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        assert "".join(one["delta"]["content"] for one in own[:-1]) == choice["message"]["content"]
        tokens = [token for one in own if one["logprobs"] for token in one["logprobs"]["content"]]
        assert tokens == [near(token) for token in choice["logprobs"]["content"]]
    assert [choice["seed"] for choice in whole["choices"]] == [3, 4]


def near(token: dict[str, Any]) -> dict[str, Any]:
    """The same token with a log-probability that another batch may have rounded in another way."""
    found = {**token, "logprob": pytest.approx(token["logprob"], abs=1e-5)}
    return found | {"top_logprobs": [near(top) for top in token["top_logprobs"]]} if "top_logprobs" in token else found


def test_an_answer_without_a_limit_fits_behind_its_prompt(generator):
    def prompt(length: int) -> list[Any]:
        return generator.encode("a" * length, {"messages": []}).request.prompt

    longest = 253 - len(prompt(0))  # all positions but 3; the last token of an answer is not read
    body = {"messages": user("a" * longest), "temperature": 0, "min_tokens": 2, "n": 2}

    async def use(service):
        refused = []
        for own in ({"max_tokens": 5}, {"messages": user("a" * (longest + 4))}):
            with pytest.raises(Refusal) as one:
                chat.read({**body, **own}, service)
            refused.append((one.value.status, one.value.param, one.value.code))
            assert "max_len" not in one.value.message
        return *[(await talk(service, body))[0] for _ in range(2)], refused

    found, again, refused = serving(generator, use)
    assert [choice["finish_reason"] for choice in found["choices"]] == ["length"] * 2
    # the second choice begins as the first one, but for the token that is read last
    counted = {"prompt_tokens": 253, "completion_tokens": 8, "total_tokens": 261}
    assert found["usage"] == {**counted, "prompt_tokens_details": {"cached_tokens": 0}}
    assert again["usage"] == {**counted, "prompt_tokens_details": {"cached_tokens": 252}}
    assert refused == [(400, param, "context_length_exceeded") for param in ("max_tokens", "messages")]


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "logit_bias"])
def test_penalties_and_biases_change_what_is_written(generator, name):
    body = {name: {str(generator.tokenizer.encode("A")[0]): 100} if name == "logit_bias" else 2}

    async def use(service):
        return [(await talk(service, {"temperature": 0, **own}))[0]["choices"][0] for own in ({}, body)]

    plain, changed = (choice["message"]["content"] for choice in serving(generator, use))
    assert plain != changed
    assert name != "logit_bias" or changed == "A" * 12


def test_forms_of_messages_mean_the_same(generator):
    plain = [{"role": "system", "content": "A."}, {"role": "user", "content": "Hi."}]
    other = [
        {"role": "developer", "content": "A."},
        {"role": "user", "name": "me", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i."}]},
    ]
    neutral = {"frequency_penalty": 0, "tools": [], "tool_choice": "none", "user": "me", "n": 1, "max_tokens": 12}
    neutral |= {"store": False, "parallel_tool_calls": True, "service_tier": "auto", "metadata": {"a": "b"}, "stop": []}
    neutral |= {"prompt_cache_key": "a", "safety_identifier": "b", "reasoning_effort": "none", "logit_bias": {}}
    neutral |= OF_VLLM

    async def use(service):
        return [chat.read({"messages": own, **more}, service) for own, more in ((plain, {}), (other, neutral))]

    first, second = serving(generator, use)
    assert first.prompts[0].request.prompt == second.prompts[0].request.prompt
    assert {one.prompts[0].request.options.max_len for one in (first, second)} == {12}
    kinds = [[type(item) for item in one.prompts[0].request.processors.items] for one in (first, second)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("own", [{}, {"ignore_eos": True}])
@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
def test_a_stop_text_or_token_ends_an_answer(generator, field, own):
    found = generator.generate("Hi.", options={"messages": []}).answers[0]
    stop = found.text[2:4] if field == "stop" else [next(one for one in found.tokens if one != found.tokens[0])]
    count = found.text.index(stop) if field == "stop" else found.tokens.index(*stop)

    async def use(service):
        body = {"messages": user("Hi."), "temperature": 0, "logprobs": True, field: stop, **own}
        return await talk(service, body), await talk(service, {**body, "stream": True})

    ((whole,), (_, *chunks)) = serving(generator, use)
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == generator.tokenizer.decode(found.tokens[:count])
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "stop"
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
    tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["content"]]
    # The second of two requests finds the prompt read, by products of other shapes.
    expected = [{**token, "logprob": pytest.approx(token["logprob"])} for token in choice["logprobs"]["content"]]
    assert tokens == expected
    assert field == "stop" or len(tokens) == count


def test_an_answer_that_ignores_ends_has_all_its_tokens(generator):
    body = {"messages": user("Hi."), "logit_bias": {str(generator.framing.ends[0]): 100}, "temperature": 0}

    async def use(service):
        return [(await talk(service, {**body, **own}))[0] for own in ({}, {"ignore_eos": True, "max_tokens": 7})]

    ended, long = serving(generator, use)
    assert [one["usage"]["completion_tokens"] for one in (ended, long)] == [1, 7]
    assert [one["choices"][0]["finish_reason"] for one in (ended, long)] == ["stop", "length"]


def test_an_end_token_of_the_model_ends_an_answer(generator, tmp_path):
    tokens = list(generator.generate("Hi.", options={"messages": []}).answers[0].tokens)
    end = next(token for token in tokens if token != tokens[0])
    make_chat_model(tmp_path, end_tokens=[end])

    async def use(service):
        return await talk(service, {"messages": [{"role": "user", "content": "Hi."}], "temperature": 0})

    (choice,) = serving(ftk.load_generator(tmp_path / "run", device="cpu", max_len=12), use)[0]["choices"]
    assert choice["message"]["content"] == generator.tokenizer.decode(tokens[: tokens.index(end)])
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "own",
    [
        {"guided_regex": "[0-9]{2}-x"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 12}}}},
    ],
)
def test_answers_match_their_guide(generator, own):
    pytest.importorskip("llguidance", reason="needs llguidance (pip install ftk[guided])")

    async def use(service):
        return await talk(service, {"n": 3, **own})

    for choice in serving(generator, use)[0]["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch("[0-9]{2}-x|12", choice["message"]["content"])


def user(content: Any, **more: Any) -> list[Any]:
    return [{"role": "user", "content": content, **more}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi."}, "messages"),
        ({"messages": ["Hi."]}, "messages"),
        ({"messages": SAID[:3]}, "messages"),
        ({"messages": user("")}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": user([{"type": "image_url", "image_url": "a"}])}, "messages[0].content"),
        ({"messages": user("a", name=3)}, "messages[0].name"),
        ({"min_tokens": 13}, "min_tokens"),
        ({"messages": user("word " * 200)}, "messages"),
        ({"messages": [*user("word " * 20_000), *user("a")]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"model": "run", "prompt": "a"}, "prompt"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"thinking": False}}, "messages"),
    ],
)
def test_bad_conversations_are_refused_with_the_field(generator, body, param):
    async def use(service):
        with pytest.raises(Refusal) as refused:
            chat.read({"messages": SAID, **body}, service)
        return refused.value.status, refused.value.param

    assert serving(generator, use) == (400, param)


def test_a_model_without_a_template_says_so(made_place):
    async def use(service):
        with pytest.raises(Refusal, match="no chat template; use /v1/completions") as refused:
            chat.read({"messages": SAID}, service)
        return refused.value.status, refused.value.code

    assert serving(ftk.load_generator(made_place / "run", max_len=4), use) == (400, "no_chat_template")


def test_ftk_interactive_talks_by_the_template_and_reads_each_turn_once(tmp_path, capsys, monkeypatch):
    make_chat_model(tmp_path)
    texts, read, remember = ["Hi.", "Bye.", "Well.", "Bye."], [], CachedDecoder._remember

    def counted(self, rows, frames):
        read.append(len(frames[0].tokens))
        remember(self, rows, frames)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(texts).encode()), encoding="utf-8"))
        patch.setattr(CachedDecoder, "_remember", counted)
        assert interactive.main(["--path", str(tmp_path / "run"), "--chat", "--max-len", "6", "--device", "cpu"]) == 0
    generator, said, lengths = ftk.load_generator(tmp_path / "run", device="cpu", max_len=6), [], []
    out = capsys.readouterr().out
    for text in texts:
        lengths.append(len(generator.encode(text, {"messages": said}).request.prompt))
        answer = generator.generate(text, options={"messages": said}).text
        assert f"> {text}\n{answer}\n" in out
        said = [*said, *user(text), {"role": "assistant", "content": answer}]
    # An engine has room for twice the tokens that it was made for: the third turn needs another one.
    assert (read[0], read[2]) == (lengths[0], lengths[2])
    for turn in (1, 3):
        assert read[turn] < lengths[turn] - lengths[turn - 1]


def test_calls_that_share_an_engine_may_overlap_and_grow(tmp_path):
    make_chat_model(tmp_path)
    own, other = (ftk.load_generator(tmp_path / "run", device="cpu", max_len=6, batch_size=4) for _ in range(2))
    own.keeps_engine = True
    texts = ["Hi.", "Bye.", "Well."]
    expected = [result.text for result in other.generate(texts)]
    first = own.engine([own.encode("Hi.").request])
    assert own.generate("Hi.").text == expected[0]
    assert own.engine([own.encode("Hi.").request]) is first
    pieces = own.stream("Hi.")
    written = next(pieces).filled
    assert [result.text for result in own.generate(texts)] == expected
    assert written + "".join(piece.filled for piece in pieces) == expected[0]
    assert own.engine([own.encode(text).request for text in texts]).decoder.num_rows == 3
