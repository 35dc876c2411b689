"""What the service asks of an encoded prompt: its order for other ranks, its length, and why its answers ended."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftk.generation.config import checked_config
from ftk.generation.token_text import text_behind

if TYPE_CHECKING:
    from ftk.generation.results import EncodedText, TextAnswer
    from ftk.generation.text import TextGenerator


def with_adapter(prompt: EncodedText, adapter: str | None) -> EncodedText:
    """The prompt, answered with an adapter."""
    return dataclasses.replace(prompt, request=dataclasses.replace(prompt.request, adapter=adapter))


def order_of(generator: TextGenerator[Any], prompt: EncodedText) -> dict[str, Any]:
    """What another rank needs to make this prompt itself, as JSON holds it."""
    request = prompt.request
    usual, own = vars(generator.config), vars(request.options)
    return {
        "prompt": prompt.prompt if prompt.ids is None else [*prompt.ids],
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


async def ended_by(generator: TextGenerator[Any], prompt: EncodedText, answers: Sequence[TextAnswer]) -> str:
    """As `finish_reason`, which takes a thread where it decodes an answer."""
    longest = prompt.request.options.max_len
    if not prompt.request.processors.cuts or all(len(answer.tokens) < longest for answer in answers):
        return finish_reason(generator, prompt, answers)
    return await asyncio.to_thread(finish_reason, generator, prompt, answers)


def finish_reason(generator: TextGenerator[Any], prompt: EncodedText, answers: Sequence[TextAnswer]) -> str:
    """Why answers ended: an end token or a stop text, or their length."""

    def is_cut(answer: TextAnswer) -> bool:
        if len(answer.tokens) < prompt.request.options.max_len or len(answer.token_logprobs) > len(answer.tokens):
            return False
        if not prompt.request.processors.cuts:
            return True
        text = text_behind(generator.tokenizer.decode, generator.ids_before_answers(prompt), answer.tokens)
        return prompt.request.processors.cut(text) == text  # the last token may hold a stop text

    return "length" if not answers or any(map(is_cut, answers)) else "stop"
