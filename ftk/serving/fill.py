"""`/v1/fill` and `/v1/score`: all that a generator knows about its answers, in ftk's own names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ftk.generation.config_groups import FILTERS
from ftk.generation.processors.steering import PROMPT_OPTIONS
from ftk.generation.search import strategy
from ftk.generation.token_text import text_behind, texts_behind
from ftk.serving.completions import model_of, usage_of
from ftk.serving.encoded import num_prompt_tokens, with_adapter
from ftk.serving.fields import Fields
from ftk.serving.guides import guide_of
from ftk.serving.prompts import MOST_ALTERNATIVES, encode, plain_search, seed_of, texts_of
from ftk.serving.refusal import Refusal

if TYPE_CHECKING:
    from ftk.generation.results import EncodedText, Span, TextAnswer, TextResult
    from ftk.generation.text import TextGenerator
    from ftk.serving.service import Service

_MOST_CANDIDATES = 256
_TOKENS_AT_ONCE = 256  # of candidates that are scored between two steps; a longer one goes alone


def read(values: dict[str, Any], service: Service) -> tuple[list[EncodedText], bool]:
    """The prompts of a request, and whether their answers are streamed.

    Raises:
        Refusal: it is not allowed, or the service takes no prompts.
    """
    fields = Fields(values)
    model = model_of(fields, service)
    texts = texts_of(fields, service)
    generator = service.admit()
    stream, seed = fields.flag("stream"), seed_of(fields)
    names = (*PROMPT_OPTIONS, *generator.own_options)
    options = {name: fields.values.pop(name) for name in names if name in fields.values}
    fields.known += names
    guide = guide_of(fields)
    if guide is not None and options.setdefault("guide", guide) is not guide:
        raise Refusal(400, "guide and another field both say what an answer must match; give one", "guide")
    search: dict[str, Any] = {"alternatives": fields.whole("alternatives", 0, MOST_ALTERNATIVES, 0)}
    nbest = fields.whole("nbest", 1, strategy(generator.config).width)
    draws = generator.config.strategy in ("sampling", "beam_sampling")
    if fields.flag("sampling", draws):
        limits = {"temperature": (1e-6, 1e6), "top_p": (1e-9, 1.0), "min_p": (0.0, 1.0), "typical_p": (1e-9, 1.0)}
        own = {name: fields.number(name, *limits[name]) for name in FILTERS if name in limits}
        own["top_k"] = fields.whole("top_k", 0, 10**9)
        given = {name: value for name, value in own.items() if value is not None}
        search |= given if draws else plain_search(generator.config, sampling=True, **given)
    elif draws:
        search |= plain_search(generator.config)
    search |= {} if nbest is None else {"nbest": nbest}
    fields.known += FILTERS
    for name in FILTERS:
        if name in fields.values:
            raise Refusal(400, f"{name} is for samples; set sampling", name)
    fields.end()
    fits = options.get("max_len") is None
    prompts = [encode(service, text, options, search, seed, stream=stream, model=model, fits=fits) for text in texts]
    return prompts, stream


async def events(
    prompts: Sequence[EncodedText], stream: bool, service: Service
) -> AsyncGenerator[dict[str, Any], None]:
    """The answers to a request: for a stream an object per piece and per result, else one with all results.

    A stream that has to wait for a row says first how many prompts are ahead of it.
    """
    generator = service.generator
    assert generator is not None, "it has taken the prompts"
    results: dict[int, dict[str, Any]] = {}
    if stream and (ahead := service.num_ahead) is not None:
        service.check_room(len(prompts))
        yield {"type": "waiting", "ahead": ahead}
    async with aclosing(service.answer(prompts)) as pieces:
        async for place, piece in pieces:
            if stream:
                yield {
                    "type": "piece",
                    "prompt": place,
                    "answer": piece.number,
                    "text": piece.text,
                    "tokens": _tokens(generator, piece.tokens, piece.token_logprobs),
                    "segments": _segments(piece.filled, piece.filled_spans),
                }
            if piece.result is not None:
                results[place] = await asyncio.to_thread(_result, generator, prompts[place], piece.result)
                if stream:
                    yield {"type": "result", "prompt": place, **results[place]}
    if not stream:
        yield {"results": [results[place] for place in range(len(prompts))]}


async def scores(values: dict[str, Any], service: Service) -> AsyncGenerator[dict[str, Any], None]:
    """Log-probabilities of given answers: `candidates`, each a list with the texts of all answers of the prompt, or a
    text where there is one."""
    fields = Fields(values)
    model = model_of(fields, service)
    prompt, end = fields.text("prompt"), fields.flag("end", True)
    candidates = fields.take(
        "candidates", _checked_candidates, "a list of texts, or of lists with a text for each answer", []
    )
    fields.end()
    if prompt is None or not candidates:
        raise Refusal(400, "give a prompt, and candidates: a text for each, or a list with a text for each answer")
    generator = service.admit()
    # In threads: a tokenizer would hold up the loop.
    await asyncio.to_thread(encode, service, prompt, {"max_len": 1}, {}, 0, stream=False)  # nothing is written
    encoded = await asyncio.to_thread(generator.encode_candidates, prompt, candidates, end)
    adapter = service.adapter_of(model)
    encoded = with_adapter(encoded, adapter)
    calls = []
    for part in await asyncio.to_thread(_parts, generator, encoded, service.worker.slots):
        own = replace(encoded, candidates=encoded.candidates[part])
        order = {"prompt": prompt, "candidates": candidates[part], "end": end, "adapter": adapter}
        calls.append((partial(generator.score_encoded, [own]), order))
    scored = [answers for (own,) in await service.call(*calls) for answers in own]
    before = generator.ids_before_answers(encoded)
    yield await asyncio.to_thread(
        lambda: {"candidates": [[_answer(generator, answer, before) for answer in own] for own in scored]}
    )


def _parts(generator: TextGenerator[Any], encoded: EncodedText, slots: int) -> list[slice]:
    """Which candidates are scored at once.

    Raises:
        Refusal: one is too long.
    """
    framing, request = generator.framing, encoded.request
    frame = framing.first(request)
    num_read = len(frame.tokens) + len(frame.source)
    starts, size = [0], 0
    for number, candidate in enumerate(encoded.candidates):
        length = len(framing.branch(request, candidate).tokens)
        if num_read + length > slots:
            text = f"candidate {number + 1} has {num_read + length} tokens with the prompt; at most {slots} are allowed"
            raise Refusal(400, text, "candidates")
        if size and size + length > max(_TOKENS_AT_ONCE, num_read):
            starts.append(number)
            size = 0
        size += length
    return [slice(*ends) for ends in pairwise([*starts, len(encoded.candidates)])]


def described(generator: TextGenerator[Any]) -> dict[str, Any]:
    """What a client must know about a model to ask it: its gaps, and the service's own options."""
    names = ("max_len", "sampling", "temperature", "top_k", "top_p", "min_p")
    draws = generator.config.strategy in ("sampling", "beam_sampling")
    return {
        "gaps": list(generator.gaps),
        "max_alternatives": MOST_ALTERNATIVES,
        **{name: getattr(generator.config, name) for name in names},
        "sampling": draws,
    }


def _checked_candidates(value: Any) -> list[list[str]] | None:
    if not isinstance(value, list) or len(value) > _MOST_CANDIDATES:
        return None
    lists = [[own] if isinstance(own, str) else own for own in value]
    is_right = all(isinstance(own, list) and all(isinstance(text, str) for text in own) for own in lists)
    return lists if is_right else None


def _result(generator: TextGenerator[Any], prompt: EncodedText, result: TextResult) -> dict[str, Any]:
    before = generator.ids_before_answers(prompt)
    spans = [(start, end, number) for number, (start, end) in enumerate(result.spans)]
    return {
        "text": result.text,
        "segments": _segments(result.text, spans),
        "answers": [_answer(generator, answer, before) for answer in result.answers],
        "seed": prompt.request.seed,
        "usage": usage_of(num_prompt_tokens(generator, prompt), [result]),
    }


def _segments(text: str, spans: Sequence[Span | tuple[int, int, int]]) -> list[dict[str, Any]]:
    """A text in parts, each with the number of the answer that it belongs to: places count otherwise in JavaScript."""
    segments: list[dict[str, Any]] = []
    at = 0
    for start, end, number in sorted(spans):
        segments += [{"text": text[at:start], "answer": None}] if start > at else []
        segments.append({"text": text[start:end], "answer": number})
        at = end
    return segments + ([{"text": text[at:], "answer": None}] if at < len(text) else [])


def _answer(generator: TextGenerator[Any], answer: TextAnswer, before: Sequence[int]) -> dict[str, Any]:
    tokens = _tokens(generator, answer.tokens, answer.token_logprobs, before)
    ended = len(answer.token_logprobs) > len(answer.tokens)
    end = {"logprob": answer.token_logprobs[-1]} if ended else None
    places: list[dict[str, Any]] = [*tokens] if end is None else [*tokens, end]
    for place, (token, own) in enumerate(zip(places, answer.alternatives, strict=False)):
        left = [*before, *answer.tokens[:place]]
        token["alternatives"] = [_alternative(generator, left, *pair) for pair in own]
    return {
        "text": answer.text,
        "logprob": answer.logprob,
        "score": answer.score,
        "ended": ended,
        "tokens": tokens,
        "end": end,
        "others": [_answer(generator, other, before) for other in answer.others],
        **answer.named,
    }


def _alternative(generator: TextGenerator[Any], left: Sequence[int], token: int, logprob: float) -> dict[str, Any]:
    is_end = token in generator.framing.ends
    is_command = any(token == command.id for command in generator.tokenizer.command_tokens)  # no text spells it
    text = "" if is_end else text_behind(generator.tokenizer.decode, left, [token])
    return {"id": int(token), "text": text, "logprob": logprob, "end": is_end, "command": is_command and not is_end}


def _tokens(
    generator: TextGenerator[Any], tokens: Sequence[int], logprobs: Sequence[float], before: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Tokens with their texts as they read one behind the other."""
    texts = texts_behind(generator.tokenizer.decode, before, tokens)
    return [
        {"id": int(token), "text": text, "logprob": logprob}
        for token, text, logprob in zip(tokens, texts, logprobs, strict=False)
    ]
