"""Clients that others wrote work with ftk-serve, given its address alone: openai, LangChain, LlamaIndex."""

from __future__ import annotations

import pytest

from tests.cli.test_serve import server
from tests.serving.test_chat import make_chat_model

CHAT = [{"role": "user", "content": "Hi."}]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    make_chat_model(folder)
    with server(folder) as (_, port, _):
        yield f"http://127.0.0.1:{port}/v1"


def test_openai(address):
    openai = pytest.importorskip("openai", reason="needs openai: pip install openai")
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    request = {"model": "run", "messages": CHAT, "temperature": 0, "max_completion_tokens": 8}
    whole = client.chat.completions.create(**request, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert choice.finish_reason in ("stop", "length")
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * len(choice.logprobs.content)
    usage = {"include_usage": True}
    pieces = list(
        client.chat.completions.create(**request, stream=True, stream_options=usage, logprobs=True, top_logprobs=2)
    )
    parts = [part.choices[0].logprobs for part in pieces[:-1]]
    found = [token for part in parts if part is not None for token in part.content]
    expected = choice.logprobs.content
    assert [(one.token, one.bytes) for one in found] == [(one.token, one.bytes) for one in expected]
    # The second of two requests finds the prompt read, by products of other shapes.
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected])
    assert [len(one.top_logprobs) for one in found] == [2] * len(found)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == choice.message.content
    details = {"cached_tokens": whole.usage.prompt_tokens - 1}  # the last one is read again
    assert pieces[-1].usage.to_dict() == {**whole.usage.to_dict(), "prompt_tokens_details": details}
    assert {piece.system_fingerprint for piece in pieces} == {whole.system_fingerprint}
    for own in ({"stop": []}, {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"5": -100}}):
        neutral = {"user": "me", "store": False, "service_tier": "auto", "parallel_tool_calls": False, "n": 2}
        more = client.chat.completions.create(**request, **own, **neutral, metadata={"a": "b"}, prompt_cache_key="c")
        assert more.usage.prompt_tokens == whole.usage.prompt_tokens
    (scored,) = client.completions.create(
        model="run", prompt=[[70, 71, 72]], echo=True, logprobs=1, max_tokens=1, temperature=0
    ).choices
    assert scored.logprobs.token_logprobs[0] is None
    assert len(scored.logprobs.top_logprobs) == len(scored.logprobs.tokens) == 4
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="run", messages=[{"role": "user", "content": "a" * 300}])
    assert long.value.code == "context_length_exceeded"
    answer = choice.message.model_dump()  # as programs send it back
    client.chat.completions.create(**{**request, "messages": [*CHAT, answer, *CHAT]})
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**request, "messages": [answer]})
    assert refused.value.param == "messages"


def test_langchain(address):
    langchain = pytest.importorskip("langchain_openai", reason="needs langchain-openai: pip install langchain-openai")
    given = {"base_url": address, "api_key": "none", "model": "run", "temperature": 0, "max_retries": 0}
    chat = langchain.ChatOpenAI(**given)
    whole = chat.invoke([("system", "Be brief."), ("user", "Hi.")])
    assert "".join(chunk.content for chunk in chat.stream([("system", "Be brief."), ("user", "Hi.")])) == whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    text = langchain.OpenAI(**given)
    assert "".join(text.stream("Hi.")) == text.invoke("Hi.")


def test_llama_index(address):
    like = pytest.importorskip(
        "llama_index.llms.openai_like", reason="needs llama-index-llms-openai-like: pip install it"
    )
    given = {"model": "run", "api_base": address, "api_key": "none", "temperature": 0.0, "max_retries": 0}
    text = like.OpenAILike(**given, is_chat_model=False, context_window=256)
    assert [*text.stream_complete("Hi.")][-1].text == text.complete("Hi.").text
    chat = like.OpenAILike(**given, is_chat_model=True, context_window=256)
    from llama_index.core.llms import ChatMessage

    said = [ChatMessage(role="user", content="Hi.")]
    assert [*chat.stream_chat(said)][-1].message.content == chat.chat(said).message.content
