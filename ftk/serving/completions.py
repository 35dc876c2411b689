"""`/v1/completions`: the form of OpenAI's clients; a `suffix` asks for what stands between two texts."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ftk.builtins import BUILTIN_MODULES
from ftk.errors import UserError
from ftk.generation.engine.scoring import Scored, score
from ftk.generation.results import TextPiece, TextResult
from ftk.generation.token_text import text_behind, texts_behind
from ftk.serving.encoded import ended_by, finish_reason, num_prompt_tokens, with_adapter
from ftk.serving.fields import Fields
from ftk.serving.guides import guide_of
from ftk.serving.prompts import encode, plain_search, prompts_of, seed_of, why_not_causal
from ftk.serving.refusal import Refusal
from ftk.version import __version__

if TYPE_CHECKING:
    from ftk.generation.config import GenerationConfig
    from ftk.generation.results import EncodedText, TextAnswer
    from ftk.generation.text import TextGenerator
    from ftk.serving.service import Service

USUAL_TOKENS = 16  # of an answer, as OpenAI's
_MOST_STOPS = 16
_BIAS = 100
_MOST_SPACES = 64  # in front of a token, of a prompt whose tokenizer drops them
_NAMES = {"max_len": "max_tokens", "min_len": "min_tokens"}  # of ftk's options -> of OpenAI's


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
        count: answers to each prompt.
        writes: whether there are answers; else `echo` alone is asked for.
    """

    prompts: Sequence[EncodedText]
    edges: Sequence[tuple[str, str]]
    model: str
    echo: bool
    logprobs: int | None
    stream: bool
    include_usage: bool
    count: int
    writes: bool


def read(values: dict[str, Any], service: Service) -> Completions:
    """What a request asks for.

    Raises:
        Refusal: it is not allowed, or the service takes no prompts.
    """
    fields = Fields(values)
    model = model_of(fields, service)
    texts = prompts_of(fields, service)
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
    max_tokens = fields.whole("max_tokens", 0, 10**9)
    longest = min(max_tokens or (USUAL_TOKENS if max_tokens is None else 1), generator.config.max_len)
    options, search = read_options(fields, generator.config, longest)
    if max_tokens == 0:  # nothing is written
        options["min_len"] = None
    if logprobs:
        search["alternatives"] = logprobs
    seed = seed_of(fields)
    usage = includes_usage(fields, stream)
    fields.must_be("best_of", (1, count), "the best of several answers is not chosen here")
    fields.end()
    if echo and logprobs is not None and (stream or not generator.reads_ids):
        why = "streams have no log-probabilities of a prompt" if stream else why_not_causal(generator)
        raise Refusal(400, f"{why}; leave echo or logprobs out, or use /v1/score", "logprobs")
    if max_tokens == 0 and not echo:
        raise Refusal(400, "max_tokens is 0; set echo, or ask for a token", "max_tokens")
    prompts: list[EncodedText] = []
    for asked in texts:
        if suffix:
            try:
                asked = generator.between(asked if isinstance(asked, str) else "", suffix)
            except UserError as error:
                raise Refusal(400, str(error), "suffix") from None
        prompt = encoded(service, asked, options, search, seed, max_tokens, stream=stream, model=model)
        if generator.num_answers(prompt) != 1 and not echo:
            raise Refusal(
                400,
                f"the prompt asks for {generator.num_answers(prompt)} answers; set echo to get the whole text, or use "
                "/v1/fill",
                "echo",
            )
        prompts += several(prompt, count)
    edges = [(text if isinstance(text, str) else "", suffix or "") for text in texts for _ in range(count)]
    return Completions(prompts, edges, model, echo, logprobs, stream, usage, count, max_tokens != 0)


def encoded(
    service: Service,
    prompt: Any,
    options: Mapping[str, Any],
    search: Mapping[str, Any],
    seed: int,
    max_tokens: int | None,
    **named: Any,
) -> EncodedText:
    """As `encode`; what is refused is called by OpenAI's names, and `max_tokens` is what the request has said."""
    try:
        return encode(service, prompt, options, search, seed, fits=max_tokens is None, **named)
    except Refusal as refusal:
        longest = service.admit().config.max_len
        if max_tokens is not None and max_tokens > longest:
            said = f"max_len is {max_tokens} (of which this service writes {longest} at most)"
            refusal.message = refusal.message.replace(f"max_len is {longest}", said)
        for own, name in _NAMES.items():
            refusal.message = re.sub(rf"\b{own}\b", name, refusal.message)
        refusal.param = _NAMES.get(str(refusal.param), refusal.param)
        raise


def read_options(fields: Fields, config: GenerationConfig, max_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a request of either form says of its answers: options of its prompts, and of the search for them."""
    options: dict[str, Any] = {
        "max_len": max_tokens,
        "stop": fields.texts("stop", _MOST_STOPS) or None,
        "stop_token_ids": fields.take("stop_token_ids", _ids, f"a list of at most {_MOST_STOPS} token ids") or None,
        "min_len": fields.whole("min_tokens", config.min_len, config.max_len),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100.0),
        "frequency_penalty": fields.number("frequency_penalty", -2.0, 2.0),
        "presence_penalty": fields.number("presence_penalty", -2.0, 2.0),
        "logit_bias": fields.take(
            "logit_bias", _biases, f"an object of token ids with numbers from {-_BIAS} to {_BIAS}"
        ),
        "guide": guide_of(fields),
    }
    if fields.flag("ignore_eos"):
        options["min_len"] = max_tokens
    for name, (neutral, why) in _NEUTRAL.items():
        fields.must_be(name, neutral, why)
    for name in _FOR_LOGS:
        fields.text(name)
    fields.object("metadata")
    return options, _search(fields, config)


def _biases(value: Any) -> list[str] | None:
    """As the option has them: "ID=VALUE"."""
    is_right = isinstance(value, dict) and all(
        token.isdecimal() and type(bias) in (int, float) and abs(bias) <= _BIAS for token, bias in value.items()
    )
    return [f"{token}={bias}" for token, bias in value.items()] if is_right else None


def _ids(value: Any) -> list[int] | None:
    is_right = isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
    return value if is_right and len(value) <= _MOST_STOPS else None


def several(prompt: EncodedText, count: int) -> list[EncodedText]:
    """A prompt `count` times, with seeds that follow one on the other."""
    seed = prompt.request.seed
    return [replace(prompt, request=replace(prompt.request, seed=(seed + number) % 2**63)) for number in range(count)]


def model_of(fields: Fields, service: Service) -> str:
    """The model's name, which may be left out; by it the service was found."""
    return str(fields.text("model", service.name))


def _search(fields: Fields, config: GenerationConfig) -> dict[str, Any]:
    """Options of generation, by default the service's; the temperature 0 is greedy search.

    Others are for sampling, or for the search of a plugin with which the service was started.
    """
    temperature = fields.number("temperature", 0.0, 1e6, config.temperature)
    own = {
        "temperature": temperature,
        "top_p": fields.number("top_p", 1e-9, 1.0, config.top_p),
        "top_k": max(0, fields.whole("top_k", -1, 10**9, config.top_k)),
        "min_p": fields.number("min_p", 0.0, 1.0, config.min_p),
        "typical_p": config.typical_p,
    }
    if temperature == 0:
        return plain_search(config)
    return own if config.strategy not in BUILTIN_MODULES["search"] else plain_search(config, sampling=True, **own)


def includes_usage(fields: Fields, stream: bool) -> bool:
    given = fields.object("stream_options", {})
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
        self.at = 0  # where the text of the next token begins
        self.given: list[int] = []  # tokens that have been described
        self.tokens: list[int] = []
        self.token_logprobs: list[float] = []
        self.alternatives: list[Sequence[tuple[int, float]]] = []
        self._shown = ""  # of all, up to where the answer begins
        self._has_begun = False

    def add(self, piece: TextPiece) -> str:
        """What a piece adds to the text."""
        self.tokens += piece.tokens
        self.token_logprobs += piece.token_logprobs
        self.alternatives += piece.alternatives
        new = piece.filled if self.echo else self._part(piece)
        self.text += new
        return new

    def place(self, word: str, is_command: bool) -> tuple[str, int]:
        """The next token's text as it stands in the text, and where; a command token may stand in its ids alone."""
        part = self._begun(word)
        if is_command and part != word:
            return word, self.at
        # Of the last one a stop text may cut off the end.
        if part != word and self.at + len(part) < len(self.text):
            # An answer may lack white space at its ends, and a prompt is as it was given, which its tokens may not be.
            word, behind = word.strip(), self.text[self.at : self.at + _MOST_SPACES]
            spaces = len(behind) - len(behind.lstrip())
            self.at += spaces if word and self.text.startswith(word, self.at + spaces) else 0
            part = self._begun(word) or self._ended(word)
        start, self.at = self.at, min(self.at + len(part), len(self.text))
        return part, start

    def _begun(self, word: str) -> str:
        """As much of a word as the text has in this place."""
        while word and not self.text.startswith(word, self.at):
            word = word[:-1]
        return word

    def _ended(self, word: str) -> str:
        """The end of a word that the text has in this place: of a piece that goes on with a word, without its mark."""
        ends = (word[cut:] for cut in range(1, len(word)))
        return next((end for end in ends if self.text.startswith(end, self.at)), word)

    def _part(self, piece: TextPiece) -> str:
        new, at = "", 0
        for start, end, _ in piece.filled_spans:
            if not self._has_begun:
                self._has_begun = True
                shown = self._shown + piece.filled[:start]
                new += _joint(shown[len(shown.rstrip()) :], self.before[len(self.before.rstrip()) :])
                self.at = len(new)
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
    generator = service.admit()
    head = head_of("cmpl", "text_completion", asked.model, generator)
    unknown = {"usage": None} if asked.include_usage else {}
    lines = [Line(*edge, asked.echo) for edge in asked.edges]
    scored = await _scored(asked, service) if asked.echo and asked.logprobs is not None else []
    results: dict[int, TextResult] = {}
    async with aclosing(service.answer(asked.prompts) if asked.writes else _echoed(asked.prompts)) as pieces:
        async for place, piece in pieces:
            line, prompt = lines[place], asked.prompts[place]
            new = line.add(piece)
            if piece.result is not None:
                results[place] = piece.result
            if not asked.stream:
                continue
            reason = None if piece.result is None else await ended_by(generator, prompt, piece.result.answers)
            if new or reason:
                logprobs = await _new_logprobs(generator, line, prompt, asked.logprobs)
                choice = {"index": place, "text": new, "logprobs": logprobs, "finish_reason": reason}
                choice |= {"seed": prompt.request.seed} if reason else {}
                yield {**head, "choices": [choice], **unknown}
    num_read = sum(num_prompt_tokens(generator, prompt) for prompt in asked.prompts[:: asked.count])
    usage = usage_of(num_read, [results[place] for place in range(len(lines))], asked.count)
    if asked.stream:
        if asked.include_usage:
            yield {**head, "choices": [], "usage": usage}
        return

    def choice_of(place: int, line: Line) -> dict[str, Any]:
        answers, prompt, logprobs = results[place].answers, asked.prompts[place], None
        if asked.logprobs is not None:
            of_prompt = scored[place // asked.count] if scored else None
            answer = answers[0] if answers else None
            logprobs = _all_logprobs(generator, line, prompt, answer, of_prompt, asked.logprobs > 0)
        reason = finish_reason(generator, prompt, answers)
        choice = {"index": place, "text": line.text, "logprobs": logprobs, "finish_reason": reason}
        return {**choice, "seed": prompt.request.seed}

    # In a thread: all alternatives are decoded.
    choices = [await asyncio.to_thread(choice_of, *numbered) for numbered in enumerate(lines)]
    yield {**head, "choices": choices, "usage": usage}


async def _new_logprobs(
    generator: TextGenerator[Any], line: Line, prompt: EncodedText, count: int | None
) -> dict[str, Any] | None:
    """Those of the tokens since the last chunk, with `count` likeliest ones, decoded in a thread; None: not asked."""
    tokens, logprobs, alternatives = line.tokens, line.token_logprobs, line.alternatives
    before = [*generator.ids_before_answers(prompt), *line.given]
    line.given += tokens
    line.tokens, line.token_logprobs, line.alternatives = [], [], []
    if count is None:
        return None
    parts = generator, line, before, tokens, logprobs[: len(tokens)]
    return await asyncio.to_thread(_token_lists, *parts, alternatives) if count else _token_lists(*parts)


async def _echoed(prompts: Sequence[EncodedText]) -> AsyncGenerator[tuple[int, TextPiece], None]:
    """The prompts as pieces without an answer."""
    for place, prompt in enumerate(prompts):
        result = TextResult(prompt.prompt, prompt.prompt, [])
        yield place, TextPiece(place, 0, "", (), (), filled=prompt.prompt, result=result)


async def _scored(asked: Completions, service: Service) -> list[Scored]:
    """For each different prompt the log-probabilities of its tokens behind the first."""
    generator, calls = service.admit(), []
    for prompt in asked.prompts[:: asked.count]:
        first, *rest = generator.ids_before_answers(prompt)
        adapter = prompt.request.adapter
        own = with_adapter(generator.encode_candidates([first], [[rest]], False), adapter)  # type: ignore[arg-type, list-item]
        order = {"prompt": [first], "candidates": [[rest]], "end": False, "adapter": adapter}
        calls.append((partial(score, generator.model, generator.framing, [own.request], [own.candidates]), order))
    return [found for ((found,),) in await service.call(*calls)]


def head_of(name: str, kind: str, model: str, generator: TextGenerator[Any]) -> dict[str, Any]:
    """What all objects of an answer begin with."""
    return {
        "id": f"{name}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"ftk_{__version__}_{generator.digest}",
    }


def usage_of(num_read: int, results: Sequence[TextResult], count: int = 1) -> dict[str, Any]:
    """Tokens of prompts, each of which has `count` results, and tokens that were written, end tokens included."""
    written = sum(len(answer.token_logprobs) for result in results for answer in result.answers)
    cached = sum(result.num_cached for result in results[::count])
    return {
        "prompt_tokens": num_read,
        "completion_tokens": written,
        "total_tokens": num_read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _all_logprobs(
    generator: TextGenerator[Any],
    line: Line,
    prompt: EncodedText,
    answer: TextAnswer | None,
    scored: Scored | None,
    with_likeliest: bool,
) -> dict[str, Any]:
    """Of the tokens of an answer or, where these are scored, of its prompt and of the answer with its end."""
    before, lists = generator.ids_before_answers(prompt), []

    def add(left: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float | None], likeliest: Any) -> None:
        lists.append(_token_lists(generator, line, left, tokens, logprobs, likeliest if with_likeliest else None))

    if scored is not None:
        pairs = zip(scored.likeliest, scored.best, strict=True)
        add((), before, [None, *scored.logprobs], [(), *([pair] for pair in pairs)])
        line.at = len(prompt.prompt)  # tokens of a text that the tokenizer rewrites may be longer than it
        lists[0]["text_offset"] = [min(at, line.at) for at in lists[0]["text_offset"]]
    if answer is not None:
        logprobs = answer.token_logprobs[: None if scored else len(answer.tokens)]
        add(before, answer.tokens, logprobs, answer.alternatives)
    if len(lists) == 1:
        return lists[0]
    return {name: values and values + lists[1][name] for name, values in lists[0].items()}


def _token_lists(
    generator: TextGenerator[Any],
    line: Line,
    before: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    likeliest: Sequence[Sequence[tuple[int, float]]] | None = None,
) -> dict[str, Any]:
    """Of tokens behind others, each with its text as it stands in that of a choice.

    Args:
        generator: has the tokenizer.
        line: of the choice; `at` is moved behind the tokens.
        before: ids in front.
        tokens: ids.
        logprobs: one for each token, and maybe one for the end token, whose text is empty.
        likeliest: for each of `logprobs` the likeliest tokens there, best first; None: they are not asked for.
    """
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [*logprobs], "top_logprobs": [], "text_offset": []}
    texts = texts_behind(generator.tokenizer.decode, before, tokens)
    commands = {command.id for command in generator.tokenizer.command_tokens}
    for place, logprob in enumerate(logprobs):
        is_end = place == len(tokens)
        word, offset = line.place("" if is_end else texts[place], not is_end and tokens[place] in commands)
        found["tokens"].append(word)
        found["text_offset"].append(offset)
        if likeliest is None:
            continue
        token = None if is_end else tokens[place]  # an answer does not say which of several end tokens it had
        own = [] if token is None or logprob is None else [(token, logprob)]
        top: dict[str, float] = {}
        for other, value in () if logprob is None else [*likeliest[place], *own]:
            is_own = other == token
            # Of tokens that read alike the likeliest counts.
            top.setdefault(word if is_own else _spelt(generator, [*before, *tokens[:place]], other), value)
        found["top_logprobs"].append(top or None)
    return found if likeliest is not None else {**found, "top_logprobs": None}


def _spelt(generator: TextGenerator[Any], left: Sequence[int], token: int) -> str:
    """A token as it reads behind others; one that no text spells, such as a command token, by its name."""
    is_command = any(token == command.id for command in generator.tokenizer.command_tokens)
    text = "" if is_command else text_behind(generator.tokenizer.decode, left, [token])
    return text or generator.tokenizer.token_text(token)


_NOT_SHOWN = "special tokens are not shown"
_TEXTS = "tokens are given as texts"
_WHOLE = "an answer is a message of its own"
_NEUTRAL: Mapping[str, tuple[Sequence[Any], str]] = {  # field -> values that change nothing, and why no others
    "store": ([False], "nothing is stored"),
    "parallel_tool_calls": ([False, True], "there are no tools"),
    "service_tier": (["auto", "default"], "there is one tier"),
    "reasoning_effort": (["none", "minimal"], "answers are not reasoned about first"),
    # Of vLLM's clients and load generators.
    "skip_special_tokens": ([True], _NOT_SHOWN),
    "spaces_between_special_tokens": ([True], _NOT_SHOWN),
    "include_stop_str_in_output": ([False], "what ends an answer is not shown"),
    "use_beam_search": ([False], "answers are the likeliest tokens, or samples"),
    "length_penalty": ([1.0], "answers are not compared with each other"),
    "bad_words": ([[]], "use logit_bias, or forbid_words of /v1/fill"),
    "allowed_token_ids": ([], "use logit_bias, or guided_choice"),
    "prompt_logprobs": ([], "use echo with logprobs, or /v1/score"),
    "truncate_prompt_tokens": ([], "a prompt that is too long is refused"),
    "priority": ([0], "prompts are answered in the order in which they come"),
    "stream_interval": ([1], "tokens are sent as they come"),
    "return_token_ids": ([False], _TEXTS),
    "return_tokens_as_token_ids": ([False], _TEXTS),
    "add_generation_prompt": ([True], _WHOLE),
    "continue_final_message": ([False], _WHOLE),
    "chat_template_kwargs": ([{}], "a conversation has a template: /v1/chat/completions"),
}
_FOR_LOGS = ("user", "prompt_cache_key", "safety_identifier", "request_id")  # texts that change no answer
