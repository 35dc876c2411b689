"""`/v1/chat/completions`: the next message of a conversation, from models that have a template for such."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftk.generation.continuation import MESSAGES, TEMPLATE_VALUES
from ftk.generation.token_text import text_behind, texts_behind
from ftk.serving.completions import encoded, head_of, includes_usage, model_of, read_options, several, usage_of
from ftk.serving.encoded import ended_by, finish_reason, num_prompt_tokens
from ftk.serving.fields import Fields
from ftk.serving.prompts import MOST_ALTERNATIVES, seed_of
from ftk.serving.refusal import Refusal

if TYPE_CHECKING:
    from ftk.generation.results import EncodedText, TextPiece, TextResult
    from ftk.generation.text import TextGenerator
    from ftk.serving.service import Service

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Chat:
    """A request.

    Attributes:
        prompts: the conversation, once per answer.
        model: as the client calls it.
        logprobs: whether the answers come with the log-probabilities of their tokens.
        stream, include_usage: how the answers are sent.
    """

    prompts: Sequence[EncodedText]
    model: str
    logprobs: bool
    stream: bool
    include_usage: bool


def read(values: dict[str, Any], service: Service) -> Chat:
    """What a request asks for.

    Raises:
        Refusal: it is not allowed, the model takes part in no conversations, or the service takes no prompts.
    """
    fields = Fields(values)
    model = model_of(fields, service)
    given = fields.take("messages", lambda value: value if isinstance(value, list) else None, "a list of messages", [])
    generator = service.admit()
    if generator.conversation is None:
        of_adapter = "; an adapter that did is served as a model of its own (--models NAME=FOLDER)"
        raise Refusal(
            400,
            "the model did not learn from conversations, and its tokenizer has no chat template; use /v1/completions"
            + (of_adapter if service.adapter_of(model) else ""),
            "messages",
            "no_chat_template",
        )
    count = fields.whole("n", 1, service.config.max_prompts, 1)
    values = fields.object(TEMPLATE_VALUES, {})
    logprobs, stream = fields.flag("logprobs"), fields.flag("stream")
    top_logprobs = fields.whole("top_logprobs", 0, MOST_ALTERNATIVES, 0)
    max_tokens, longest = _max_tokens(fields), generator.config.max_len
    options, search = read_options(fields, generator.config, min(max_tokens or longest, longest))
    if top_logprobs:
        search["alternatives"] = top_logprobs
    seed, usage = seed_of(fields), includes_usage(fields, stream)
    for name, neutral in (("tools", []), ("tool_choice", "none"), ("modalities", ["text"])):
        fields.must_be(name, (neutral,), "answers are texts")
    fields.end()
    if top_logprobs and not logprobs:
        raise Refusal(400, "top_logprobs needs logprobs", "top_logprobs")
    *earlier, last = _messages(given)
    try:
        content, options = last["content"], {**options, MESSAGES: earlier, TEMPLATE_VALUES: values}
        prompt = encoded(service, content, options, search, seed, max_tokens, stream=stream, model=model)
    except Refusal as refusal:
        refusal.param = "messages" if refusal.param == "prompt" else refusal.param
        raise
    return Chat(several(prompt, count), model, logprobs, stream, usage)


def _max_tokens(fields: Fields) -> int | None:
    """By the newer name or the older one."""
    newer, older = (fields.whole(name, 1, 10**9) for name in ("max_completion_tokens", "max_tokens"))
    if None not in (newer, older) and newer != older:
        raise Refusal(400, "max_completion_tokens and max_tokens differ; give one", "max_tokens")
    return newer or older  # type: ignore[no-any-return]


def _messages(given: Sequence[Any]) -> list[dict[str, str]]:
    """The messages with `role` and `content`, the last one the user's.

    Raises:
        Refusal: something in them is not as it must be.
    """
    found = []
    for number, message in enumerate(given):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise Refusal(400, f"{place} must be an object with role and content", "messages")
        fields = Fields(message)
        try:
            role = fields.take("role", _role, "system, developer, user or assistant")
            content = fields.take("content", _text, "a text, or a list of parts of the type text")
            for name in ("tool_calls", "annotations"):  # of an answer that comes back
                fields.must_be(name, ([],), "messages are texts")
            fields.text("name")  # of one of several who take part; no template has it
            fields.end()
        except Refusal as refusal:
            raise Refusal(400, f"{place}: {refusal.message}", f"{place}.{refusal.param}", refusal.code) from None
        if role is None or content is None:
            raise Refusal(400, f"{place} needs role and content", place)
        found.append({"role": role, "content": content})
    if not found or found[-1]["role"] != "user" or not found[-1]["content"]:
        raise Refusal(400, "messages must end with a text of the user, which is answered", "messages")
    return found


def _role(name: Any) -> str | None:
    return _ROLES.get(name) if isinstance(name, str) else None


def _text(content: Any) -> str | None:
    """The text of a content, which may come in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [
        part["text"]
        for part in content
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    ]
    return "".join(parts) if len(parts) == len(content) else None


async def events(asked: Chat, service: Service) -> AsyncGenerator[dict[str, Any], None]:
    """The answers to a request, as objects: chunks of a stream or, else, one."""
    generator = service.admit()
    name = "chat.completion.chunk" if asked.stream else "chat.completion"
    head = head_of("chatcmpl", name, asked.model, generator)
    written = [[*generator.ids_before_answers(prompt)] for prompt in asked.prompts]
    results: dict[int, TextResult] = {}
    if asked.logprobs:  # made once, of the whole vocabulary
        await asyncio.to_thread(lambda: generator.tokenizer.partial_characters)

    def chunk(place: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        choice |= {"seed": asked.prompts[place].request.seed} if reason else {}
        return {**head, "choices": [choice], **({"usage": None} if asked.include_usage else {})}

    async def logprobs_of(place: int, piece: TextPiece) -> dict[str, Any]:
        parts = generator, written[place], piece.tokens, piece.token_logprobs
        alternatives = piece.alternatives  # in a thread, as all of them are decoded
        found = await asyncio.to_thread(_logprobs, *parts, alternatives) if alternatives else _logprobs(*parts)
        written[place] += piece.tokens
        return found

    begun: set[int] = set()
    async with aclosing(service.answer(asked.prompts)) as pieces:
        async for place, piece in pieces:
            if piece.result is not None:
                results[place] = piece.result
            if not asked.stream:
                continue
            if place not in begun:
                begun.add(place)
                yield chunk(place, {"role": "assistant", "content": ""})
            if piece.text or piece.tokens:
                logprobs = await logprobs_of(place, piece) if asked.logprobs else None
                yield chunk(place, {"content": piece.text}, logprobs)
            if piece.result is not None:
                reason = await ended_by(generator, asked.prompts[place], piece.result.answers)
                yield chunk(place, {}, reason=reason)
    num_read, count = num_prompt_tokens(generator, asked.prompts[0]), len(asked.prompts)
    usage = usage_of(num_read, [results[place] for place in range(count)], count)
    if not asked.stream:
        choices = [
            await asyncio.to_thread(_choice, generator, asked, place, results[place])  # decodes all alternatives
            for place in range(count)
        ]
        yield {**head, "choices": choices, "usage": usage}
    elif asked.include_usage:
        yield {**head, "choices": [], "usage": usage}


def _choice(generator: TextGenerator[Any], asked: Chat, place: int, result: TextResult) -> dict[str, Any]:
    (answer,) = result.answers
    logprobs = None
    if asked.logprobs:
        before = generator.ids_before_answers(asked.prompts[place])
        logprobs = _logprobs(generator, before, answer.tokens, answer.token_logprobs, answer.alternatives)
    return {
        "index": place,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": finish_reason(generator, asked.prompts[place], result.answers),
        "seed": asked.prompts[place].request.seed,
    }


def _logprobs(
    generator: TextGenerator[Any],
    before: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    alternatives: Sequence[Sequence[tuple[int, float]]] = (),
) -> dict[str, Any]:
    """Of tokens of an answer behind others."""
    decode, ids, partial = generator.tokenizer.decode, [*before, *tokens], generator.tokenizer.partial_characters

    def described(token: int, text: str, logprob: float) -> dict[str, Any]:
        own = partial.get(token, None if "\ufffd" in text else text.encode())
        return {"token": text, "logprob": logprob, "bytes": None if own is None else [*own]}

    content = []
    texts = texts_behind(decode, before, tokens)
    for number, (token, text, logprob) in enumerate(zip(tokens, texts, logprobs, strict=False)):
        left = ids[: len(before) + number]
        others = [
            described(other, text if other == token else text_behind(decode, left, [other]), value)
            for other, value in (alternatives[number] if alternatives else ())
        ]
        content.append({**described(token, text, logprob), "top_logprobs": others})
    return {"content": content, "refusal": None}
