"""`/v1/completions`: the form of OpenAI's clients; a `suffix` asks for what stands between two texts."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftk.errors import UserError
from ftk.serving.fields import Fields
from ftk.serving.guides import guide_of
from ftk.serving.prompts import encode, num_prompt_tokens, plain_search, seed_of, texts_of
from ftk.serving.refusal import Refusal

if TYPE_CHECKING:
    from ftk.generation.config import GenerationConfig
    from ftk.generation.results import EncodedText, TextAnswer, TextPiece, TextResult
    from ftk.generation.text import TextGenerator
    from ftk.serving.service import Service

USUAL_TOKENS = 16  # of an answer, as OpenAI's
_MOST_STOPS = 4


@dataclass(frozen=True)
class Completions:
    """A request.

    Attributes:
        prompts: one per answer.
        edges: what stands around each answer: (in front, behind).
        model: as the client calls it.
        echo: whether the text comes with its prompt.
        logprobs: None, or the number of likeliest tokens at each place.
        stream, include_usage: how the answers are sent.
        max_tokens: of an answer.
    """

    prompts: Sequence[EncodedText]
    edges: Sequence[tuple[str, str]]
    model: str
    echo: bool
    logprobs: int | None
    stream: bool
    include_usage: bool
    max_tokens: int


def read(values: dict[str, Any], service: Service) -> Completions:
    """What a request asks for.

    Raises:
        Refusal: it is not allowed, or the service takes no prompts.
    """
    fields = Fields(values)
    model = check_model(fields, service)
    texts = texts_of(fields, service)
    generator = service.admit()
    count = fields.whole("n", 1, service.config.max_prompts, 1)
    if len(texts) * count > service.config.max_prompts:
        raise Refusal(
            400,
            f"{len(texts)} prompts with n {count}; a request asks for {service.config.max_prompts} answers at most",
            "n",
        )
    suffix, echo = fields.text("suffix"), fields.flag("echo")
    logprobs, stream = fields.whole("logprobs", 0, 5), fields.flag("stream")
    max_tokens = min(fields.whole("max_tokens", 1, 10**9, USUAL_TOKENS), generator.config.max_len)
    options, search = read_options(fields, generator.config, max_tokens)
    if logprobs:
        search["alternatives"] = logprobs
    seed = seed_of(fields)
    usage = includes_usage(fields, stream)
    fields.must_be("best_of", (1, count), "the best of several answers is not chosen here")
    fields.end()
    if stream and logprobs:
        raise Refusal(400, "a stream gives the log-probabilities of chosen tokens alone; set logprobs to 0", "logprobs")
    if echo and logprobs is not None:
        raise Refusal(400, "the log-probabilities of a prompt are not given; leave echo or logprobs out", "logprobs")
    prompts: list[EncodedText] = []
    for text in texts:
        asked = text
        if suffix:
            try:
                asked = generator.between(text, suffix)
            except UserError as error:
                raise Refusal(400, str(error), "suffix") from None
        prompt = encode(service, asked, options, search, seed, stream=stream, model=model)
        if generator.num_answers(prompt) != 1 and not echo:
            raise Refusal(
                400,
                f"the prompt asks for {generator.num_answers(prompt)} answers; set echo to get the whole text, or use "
                "/v1/fill",
                "echo",
            )
        prompts += several(prompt, count)
    edges = [(text, suffix or "") for text in texts for _ in range(count)]
    return Completions(prompts, edges, model, echo, logprobs, stream, usage, max_tokens)


def read_options(fields: Fields, config: GenerationConfig, max_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a request of either form says of its answers: options of its prompts, and of the search for them."""
    options: dict[str, Any] = {
        "max_len": max_tokens,
        "stop": fields.texts("stop", _MOST_STOPS) or None,
        "min_len": fields.whole("min_tokens", config.min_len, config.max_len),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100.0),
        "guide": guide_of(fields),
    }
    for name in ("frequency_penalty", "presence_penalty"):
        fields.must_be(name, (0, 0.0), "repetition_penalty is what there is")
    fields.must_be("logit_bias", ({},), "it is not supported")
    fields.text("user")
    return options, _search(fields, config)


def several(prompt: EncodedText, count: int) -> list[EncodedText]:
    """A prompt `count` times, with seeds that follow one on the other."""
    seed = prompt.request.seed
    return [replace(prompt, request=replace(prompt.request, seed=(seed + number) % 2**63)) for number in range(count)]


def check_model(fields: Fields, service: Service) -> str:
    """The model's name, which may be left out.

    Raises:
        Refusal: 404; there is no model of this name.
    """
    model = str(fields.text("model", service.name))
    service.check_name(model)
    return model


def _search(fields: Fields, config: GenerationConfig) -> dict[str, Any]:
    """Options of generation; the temperature 0 is greedy search."""
    temperature = fields.number("temperature", 0.0, 1e6, 1.0)
    own = {
        "top_p": fields.number("top_p", 1e-9, 1.0, 1.0),
        "top_k": max(0, fields.whole("top_k", -1, 10**9, 0)),
        "min_p": fields.number("min_p", 0.0, 1.0, 0.0),
    }
    if temperature == 0:
        return plain_search(config)
    return plain_search(config, sampling=True, temperature=temperature, **own)


def includes_usage(fields: Fields, stream: bool) -> bool:
    given = fields.take("stream_options", lambda value: value if isinstance(value, dict) else None, "an object", {})
    if given and not stream:
        raise Refusal(400, "stream_options is for streams; set stream", "stream_options")
    own = Fields(given)
    usage = own.flag("include_usage")
    own.flag("include_obfuscation")
    own.end()
    return usage


class Line:
    """The text of one choice while its pieces come: the answer, with the white space at its joints.

    So that prompt, text and suffix make the whole text, where the tokenizer writes the prompt as it was given.

    Args:
        before, behind: the texts around it.
        echo: whether all that the generator shows is the text.
    """

    def __init__(self, before: str, behind: str, echo: bool) -> None:
        self.before, self.behind, self.echo = before, behind, echo
        self.text = ""
        self.tokens: list[int] = []
        self.token_logprobs: list[float] = []
        self._shown = ""  # of all, up to where the answer begins
        self._has_begun = False

    def add(self, piece: TextPiece) -> str:
        """What a piece adds to the text."""
        self.tokens += piece.tokens
        self.token_logprobs += piece.token_logprobs
        new = piece.filled if self.echo else self._part(piece)
        self.text += new
        return new

    def _part(self, piece: TextPiece) -> str:
        new, at = "", 0
        for start, end, _ in piece.filled_spans:
            if not self._has_begun:
                self._has_begun = True
                shown = self._shown + piece.filled[:start]
                new += _joint(shown[len(shown.rstrip()) :], self.before[len(self.before.rstrip()) :])
            new += piece.filled[max(start, at) : end]
            at = end
        if not self._has_begun:
            self._shown += piece.filled
        elif piece.result is not None and self.behind:
            rest = piece.filled[at:]
            spaces = self.behind[: len(self.behind) - len(self.behind.lstrip())]
            new += _joint(rest[: len(rest) - len(rest.lstrip())], spaces)
        return new


def _joint(spaces: str, given: str) -> str:
    """The white space between two parts that is neither of them."""
    return spaces[: max(0, len(spaces) - len(given))]


async def events(asked: Completions, service: Service) -> AsyncGenerator[dict[str, Any], None]:
    """The answers to a request, as objects: chunks of a stream or, else, one."""
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": asked.model,
    }
    generator = service.generator
    assert generator is not None, "it has taken the prompts"
    lines = [Line(*edge, asked.echo) for edge in asked.edges]
    results: dict[int, TextResult] = {}
    num_read = sum(num_prompt_tokens(generator, prompt) for prompt in asked.prompts)
    service.metrics.prompt_tokens.inc(num_read)
    async with aclosing(service.answer(asked.prompts)) as pieces:
        async for place, piece in pieces:
            new = lines[place].add(piece)
            reason = None
            if piece.result is not None:
                results[place] = piece.result
                reason = finish_reason(piece.result.answers, asked.max_tokens)
            if asked.stream and (new or reason):
                line, logprobs = lines[place], None
                if asked.logprobs is not None:
                    logprobs = _logprobs(generator, line.tokens, line.token_logprobs, len(line.text) - len(new))
                line.tokens, line.token_logprobs = [], []
                choice = {"index": place, "text": new, "logprobs": logprobs, "finish_reason": reason}
                yield {**head, "choices": [choice]}
    usage = usage_of(num_read, results.values())
    if asked.stream:
        if asked.include_usage:
            yield {**head, "choices": [], "usage": usage}
        return
    choices = []
    for place, line in enumerate(lines):
        own = results[place].answers
        logprobs = None
        if asked.logprobs is not None:
            logprobs = await asyncio.to_thread(_all_logprobs, generator, own[0], asked.logprobs)
        choices.append(
            {
                "index": place,
                "text": line.text,
                "logprobs": logprobs,
                "finish_reason": finish_reason(own, asked.max_tokens),
                "seed": asked.prompts[place].request.seed,
            }
        )
    yield {**head, "choices": choices, "usage": usage}


def usage_of(num_read: int, results: Iterable[TextResult]) -> dict[str, int]:
    """Tokens that were read, and written, end tokens included."""
    written = sum(len(answer.token_logprobs) for result in results for answer in result.answers)
    return {"prompt_tokens": num_read, "completion_tokens": written, "total_tokens": num_read + written}


def finish_reason(answers: Sequence[TextAnswer], max_tokens: int) -> str:
    """Why answers ended: an end token or a stop text, or their length."""
    is_cut = any(len(one.tokens) >= max_tokens and len(one.token_logprobs) == len(one.tokens) for one in answers)
    return "length" if is_cut else "stop"


def _logprobs(
    generator: TextGenerator[Any], tokens: Sequence[int], logprobs: Sequence[float], start: int = 0
) -> dict[str, Any]:
    """Of tokens whose text begins at `start` of a choice's text."""
    words = [generator.tokenizer.decode([token]) for token in tokens]
    return {
        "tokens": words,
        "token_logprobs": list(logprobs[: len(words)]),
        "top_logprobs": None,
        "text_offset": [start + sum(map(len, words[:place])) for place in range(len(words))],
    }


def _all_logprobs(generator: TextGenerator[Any], answer: TextAnswer, count: int) -> dict[str, Any]:
    found = _logprobs(generator, answer.tokens, answer.token_logprobs)
    if count:
        found["top_logprobs"] = [
            {generator.tokenizer.decode([token]): logprob for token, logprob in own}
            for own in answer.alternatives[: len(answer.tokens)]
        ]
    return found
