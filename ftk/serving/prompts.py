"""Prompts of a request with the options that it gives them."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ftk.errors import UserError
from ftk.generation.config import checked_config
from ftk.generation.continuation import MESSAGES
from ftk.generation.processors.steering import PROMPT_OPTIONS
from ftk.serving.refusal import Refusal

if TYPE_CHECKING:
    from ftk.generation.config import GenerationConfig
    from ftk.generation.engine.request import Request
    from ftk.generation.processors.steering import Steering
    from ftk.generation.results import EncodedText
    from ftk.generation.text import TextGenerator
    from ftk.serving.fields import Fields
    from ftk.serving.service import Service

P = TypeVar("P")

GREATEST_SEED = 2**63 - 1
MOST_ALTERNATIVES = 20
TOO_LONG = "context_length_exceeded"  # code of a refusal
_MOST_CHARACTERS = 64  # of a token; longer prompts are refused before they are read
_NEED_ROOM = ("prefix", "constraints", "min_lens")  # options that an answer of `max_len` tokens may be too short for


def seed_of(fields: Fields) -> int:
    """The seed of a request, or one that is drawn for it: no two callers get the same samples unasked."""
    return int(fields.whole("seed", 0, GREATEST_SEED, secrets.randbelow(2**32)))


def plain_search(config: GenerationConfig, **options: Any) -> dict[str, Any]:
    """Options of generation that ask for greedy search, whatever the service's own are, and then `options`."""
    names = {**config.users(), "search": (), "sampling": ()}
    defaults = {name: type(config).__dataclass_fields__[name].default for name in names}
    return {name: value for name, value in defaults.items() if getattr(config, name) != value} | options


def encode(
    service: Service,
    prompt: Any,
    options: Mapping[str, Any],
    search: Mapping[str, Any],
    seed: int,
    *,
    stream: bool,
    model: str | None = None,
    fits: bool = False,
) -> EncodedText:
    """A prompt as the engine takes it.

    Args:
        service: answers it.
        prompt: a text, or token ids.
        options: of the prompt, see `PROMPT_OPTIONS`, and `messages`, see `TextContinuer`. Its `max_len`, and `min_len`
            where it has no `max_lens`, are those of the search, which prompts share: no end token is forced.
        search: options of generation that take the place of the service's.
        seed: of random numbers.
        stream: whether its tokens are reported one by one.
        model: that answers, of the service's names; None: the one without an adapter.
        fits: whether `max_len` is lowered to the room that the model has behind the prompt.

    Raises:
        Refusal: 400, with the field where it is known; its code is `context_length_exceeded` where the model has no
            positions for the prompt with its answer.
    """
    generator = service.admit()
    check_length(service, len(prompt) + sum(len(message["content"]) for message in options.get(MESSAGES, ())))
    least, most, steering = generator.config.min_len, generator.config.max_len, generator.steering
    lengths = _lengths(generator, options)
    options = {name: value for name, value in options.items() if name not in lengths}
    search = {**search, **{name: length for name, length in lengths.items() if length is not None}}
    if "max_len" in search:
        search.setdefault("min_len", min(least, search["max_len"]))
    room = None
    try:
        encoded = generator.encode(prompt, options, seed, check=False)
        room = generator.framing.room(encoded.request)
        if fits and room is not None and room < search.get("max_len", most):
            search["max_len"] = max(1, room)
            search["min_len"] = min(search.get("min_len", least), search["max_len"])
        config = checked_config(encoded.request.options, **search) if search else encoded.request.options
        own = {"options": config, "stream": stream, "seed": seed, "adapter": service.adapter_of(model)}
        encoded = dataclasses.replace(encoded, request=dataclasses.replace(encoded.request, **own), options=options)
        _check_room(generator, encoded.request, room, service.worker.slots)
        if steering is not None and config.max_len < most:
            _check_shortened(steering, options, generator.num_answers(encoded), config)
    except UserError as error:
        named = [name for name in (*options, *search) if re.match(rf"(answer \d+: )?{name}\b", str(error))]
        is_long = room is not None and room < 1
        raise Refusal(400, str(error), named[0] if named else "prompt", TOO_LONG if is_long else None) from None
    count = generator.num_answers(encoded)
    if count > generator.most_answers:
        raise Refusal(400, f"the prompt asks for {count} answers; ask for at most {generator.most_answers}", "prompt")
    return encoded


def _lengths(generator: TextGenerator[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The lengths that a prompt's options give its search, None where they give none."""
    least, most, steering = generator.config.min_len, generator.config.max_len, generator.steering
    of_each = options.get("max_lens") or (steering is not None and steering.config.max_lens)
    # The shortest length is checked with the greatest one of each answer where these are given.
    lows = {"max_len": 1} if of_each else {"min_len": least, "max_len": 1}
    for name, low in lows.items():
        length = options.get(name)
        if length is not None and (type(length) is not int or not low <= length <= most):
            given = f"{json.dumps(length, ensure_ascii=False):.80}"
            raise Refusal(400, f"{name} is {given}; it must be a whole number from {low} to {most}", name)
    return {name: options.get(name) for name in lows}


def _check_room(generator: TextGenerator[Any], request: Request, room: int | None, slots: int) -> None:
    """Raises Refusal or UserError where a prompt with its answers does not fit the model's positions or the engine."""
    if room is not None and 0 < room < request.options.max_len:
        text = f"max_len is {request.options.max_len}, but after this prompt the model has room for {room} tokens"
        raise Refusal(400, f"{text}; lower it, or shorten the prompt", "max_len", TOO_LONG)
    generator.framing.check(request)
    if (taken := generator.framing.slots(request)) > slots:
        text = f"the prompt with its answers takes {taken} places, but the service has {slots}; shorten it"
        raise Refusal(400, text, "prompt", TOO_LONG)


def _check_shortened(
    steering: Steering, options: Mapping[str, Any], num_answers: int, config: GenerationConfig
) -> None:
    """Raises UserError if what a request wants in answers takes more tokens than it gives them: it would be missing."""
    if any(options.get(name) for name in _NEED_ROOM):
        own = {name: value for name, value in options.items() if name in PROMPT_OPTIONS}
        steering.changed(config.min_len, steering.max_len).of({**own, "max_len": config.max_len}, num_answers)


def texts_of(fields: Fields, service: Service) -> list[str]:
    """The prompts of a request, at least one. Raises Refusal if there is none, or too many."""
    return _some(fields.texts("prompt", service.config.max_prompts))


def prompts_of(fields: Fields, service: Service) -> list[str | list[int]]:
    """As `texts_of`, but one may be token ids.

    Raises:
        Refusal: there is none, or too many; the model does not go on with ids.
    """
    most = service.config.max_prompts

    def check(value: Any) -> list[str | list[int]] | None:
        given = [value] if isinstance(value, str) or _are_ids(value) else value
        is_list = isinstance(given, list) and all(isinstance(prompt, str) or _are_ids(prompt) for prompt in given)
        return given if is_list and len(given) <= most else None

    what = f"a text, a list of token ids, or a list of at most {most} of them"
    found = _some(fields.take("prompt", check, what, []))
    generator = service.admit()
    for prompt in found:
        if isinstance(prompt, str):
            continue
        if not generator.reads_ids:
            raise Refusal(400, f"{why_not_causal(generator)}; give a text in place of token ids", "prompt")
        wrong = next((token for token in prompt if token >= generator.tokenizer.vocab_size), None)
        if wrong is not None:
            raise Refusal(400, f"{wrong} is no id of the {generator.tokenizer.vocab_size} tokens", "prompt")
    return found


def why_not_causal(generator: TextGenerator[Any]) -> str:
    """Why a model's prompt is neither token ids nor scored, for messages."""
    if generator.conversation is not None:
        return "this model was trained on conversations, so its template stands around a prompt"
    return "this model is not causal: it does not go on with its prompt"


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def _some(prompts: list[P]) -> list[P]:
    if not prompts:
        raise Refusal(400, "prompt is missing; give a text, or a list of texts", "prompt")
    return prompts


def check_length(service: Service, length: int) -> None:
    """Raises Refusal if a prompt has too many characters, or ids, to fit."""
    if length > service.worker.slots * _MOST_CHARACTERS:
        raise Refusal(400, f"the prompt is {length:,} characters or ids long; shorten it", "prompt", TOO_LONG)
