"""Prompts of a request with the options that it gives them."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ftk.errors import UserError
from ftk.generation.config import checked_config
from ftk.generation.continuation import MESSAGES
from ftk.serving.refusal import Refusal

if TYPE_CHECKING:
    from ftk.generation.config import GenerationConfig
    from ftk.generation.results import EncodedText
    from ftk.generation.text import TextGenerator
    from ftk.serving.fields import Fields
    from ftk.serving.service import Service

GREATEST_SEED = 2**63 - 1
MOST_ALTERNATIVES = 20
_MOST_CHARACTERS = 64  # of a token; longer prompts are refused before they are read


def seed_of(fields: Fields) -> int:
    """The seed of a request, or one that is drawn for it: no two callers get the same samples unasked."""
    return int(fields.whole("seed", 0, GREATEST_SEED, secrets.randbelow(2**32)))


def plain_search(config: GenerationConfig, **options: Any) -> dict[str, Any]:
    """Options of generation that ask for greedy search, whatever the service's own are, and then `options`."""
    names = {**config.users(), "search": (), "sampling": ()}
    return {name: type(config).__dataclass_fields__[name].default for name in names} | options


def encode(
    service: Service,
    prompt: str,
    options: Mapping[str, Any],
    search: Mapping[str, Any],
    seed: int,
    *,
    stream: bool,
    model: str | None = None,
) -> EncodedText:
    """A prompt as the engine takes it.

    Args:
        service: answers it.
        prompt: a text.
        options: of the prompt, see `PROMPT_OPTIONS`, and `messages`, see `TextContinuer`. Its `max_len` is one of the
            search: no end token is forced.
        search: options of generation that take the place of the service's.
        seed: of random numbers.
        stream: whether its tokens are reported one by one.
        model: that answers, of the service's names; None: the one without an adapter.

    Raises:
        Refusal: 400, with the field where it is known.
    """
    generator = service.admit()
    check_length(service, len(prompt) + sum(len(message["content"]) for message in options.get(MESSAGES, ())))
    options, search = dict(options), dict(search)
    longest = options.pop("max_len", None)
    if longest is not None:
        if type(longest) is not int or not 1 <= longest <= generator.config.max_len:
            allowed = f"a whole number from 1 to {generator.config.max_len}"
            given = f"{json.dumps(longest, ensure_ascii=False):.80}"
            raise Refusal(400, f"max_len is {given}; it must be {allowed}", "max_len")
        search["max_len"] = longest
        search.setdefault("min_len", min(generator.config.min_len, longest))
    try:
        encoded = generator.encode(prompt, options, seed, check=False)
        config = checked_config(encoded.request.options, **search) if search else encoded.request.options
        encoded = dataclasses.replace(
            encoded,
            request=dataclasses.replace(
                encoded.request, options=config, stream=stream, seed=seed, adapter=service.adapter_of(model)
            ),
            options=options,
        )
        generator.framing.check(encoded.request)
    except UserError as error:
        named = [name for name in (*options, *search) if str(error).startswith(name)]
        raise Refusal(400, str(error), named[0] if named else "prompt") from None
    count = generator.num_answers(encoded)
    if count > generator.most_answers:
        raise Refusal(400, f"the prompt asks for {count} answers; ask for at most {generator.most_answers}", "prompt")
    return encoded


def texts_of(fields: Fields, service: Service) -> list[str]:
    """The prompts of a request, at least one. Raises Refusal if there is none, or too many."""
    texts = fields.texts("prompt", service.config.max_prompts)
    if not texts:
        raise Refusal(400, "prompt is missing; give a text, or a list of texts", "prompt")
    return texts


def check_length(service: Service, length: int) -> None:
    """Raises Refusal if a prompt has too many characters to fit."""
    if length > service.worker.slots * _MOST_CHARACTERS:
        raise Refusal(400, f"the prompt has {length:,} characters; shorten it", "prompt")


def with_adapter(prompt: EncodedText, adapter: str | None) -> EncodedText:
    """The prompt, answered with an adapter."""
    return dataclasses.replace(prompt, request=dataclasses.replace(prompt.request, adapter=adapter))


def order_of(generator: TextGenerator[Any], prompt: EncodedText) -> dict[str, Any]:
    """What another rank needs to encode a prompt of `encode` itself: what JSON holds."""
    request = prompt.request
    usual, own = vars(generator.config), vars(request.options)
    return {
        "prompt": prompt.prompt,
        "options": dict(prompt.options),
        "search": {name: value for name, value in own.items() if value != usual[name]},
        "seed": request.seed,
        "stream": request.stream,
        "adapter": request.adapter,
    }


def ordered(generator: TextGenerator[Any], order: Mapping[str, Any]) -> EncodedText:
    """The prompt of an order, see `order_of`."""
    encoded: EncodedText = generator.encode(order["prompt"], order["options"], order["seed"], check=False)
    own = {name: order[name] for name in ("seed", "stream", "adapter")}
    config = checked_config(generator.config, **order["search"])
    return dataclasses.replace(encoded, request=dataclasses.replace(encoded.request, options=config, **own))


def num_prompt_tokens(generator: TextGenerator[Any], prompt: EncodedText) -> int:
    """Tokens that the model reads for a prompt."""
    frame = generator.framing.first(prompt.request)
    return len(frame.tokens) + len(frame.source)
