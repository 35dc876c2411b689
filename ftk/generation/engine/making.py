"""Engines with a decoder of the size that requests need: known ones, or those of a service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftk.generation.config import GenerationConfig
from ftk.generation.engine.adapted import AdaptedDecoder
from ftk.generation.engine.decoder import CachedDecoder, Decoder
from ftk.generation.engine.engine import Engine
from ftk.generation.engine.fusion import FusedDecoder, LanguageModel
from ftk.generation.engine.recorded import recorder_for
from ftk.generation.engine.request import Framing, Request
from ftk.generation.search import Strategy, strategy
from ftk.modules.adapters.side_by_side import choice_of
from ftk.modules.cuda_graphs import Recorder

READ_AT_ONCE = 4096
"""Tokens of frames that a step of a service reads at most: what is being written waits for no more than one long
prompt. Below that a read costs as much per token as several short ones."""

PATIENCE = 64
"""`enter_after_steps` where throughput counts and not the time to the first token."""


def engine_for(
    model: Any,
    framing: Framing,
    requests: Sequence[Request],
    batch_size: int,
    language_model: LanguageModel | None = None,
    *,
    has_more_room: bool = False,
) -> Engine:
    """An engine just large enough for some requests, of which `batch_size` are answered at once.

    Args:
        batch_size: rows at most.
        language_model: its log-probabilities are added to the model's.
        has_more_room: for later requests, which begin as these and are longer: places for twice as many tokens.

    Raises:
        UserError: their options are not allowed.
    """
    options = {id(request.options): request.options for request in requests}
    strategies = list(map(strategy, options.values()))
    num_rows = min(batch_size, len(requests))
    factor = 2 if has_more_room else 1
    slots = factor * max(map(framing.slots, requests), default=0)
    source = 0
    if hasattr(model, "encode"):
        source = max((len(framing.first(request).source) for request in requests), default=0)
    own = _decoder(model, strategies, num_rows, slots, source)
    decoder: Decoder = own
    if language_model is not None:
        reader = language_model.model
        others = factor * max(map(language_model.slots, requests), default=0)
        sources = source if hasattr(reader, "encode") else 0
        record = _recorder(reader, strategies)
        other = CachedDecoder(
            reader, num_rows, own.width, others, own.branch_capacity, source_capacity=sources, record=record
        )
        decoder = FusedDecoder(own, other, language_model)
    return Engine(decoder, framing, enter_after_steps=PATIENCE)


def lasting_engine(model: Any, framing: Framing, options: GenerationConfig, slots: int) -> Engine:
    """An engine for requests that are not known yet, of which `options.batch_size` are answered at once.

    Args:
        options: the widest search and the longest answers that a request may ask for.
        slots: places of a prompt with its answers at most; of an encoder-decoder tokens of a source.

    Raises:
        UserError: the options are not allowed; the caches do not fit into the device's memory.
    """
    source = 0
    if hasattr(model, "encode"):
        source, slots = slots, framing.slots(Request(()))  # of which the decoder reads nothing but its start
    return Engine(
        _decoder(model, [strategy(options)], options.batch_size, slots, source), framing, read_at_once=READ_AT_ONCE
    )


def _decoder(model: Any, strategies: Sequence[Strategy], num_rows: int, slots: int, source: int) -> CachedDecoder:
    """A decoder with the memory that searches of these strategies take."""
    width = max((strategy.width for strategy in strategies), default=1)
    branch = max((strategy.num_steps for strategy in strategies), default=1) - 1
    observers = [strategy.target.observer for strategy in strategies if strategy.target.observer is not None]
    observer = observers[0](num_rows, slots) if observers else None
    choice, parts = choice_of(model), (model, num_rows, width, slots, branch, observer, source)
    if choice is not None:  # which rows an adapter has changes from step to step, so that none is recorded
        return AdaptedDecoder(choice, *parts)
    return CachedDecoder(*parts, _recorder(model, strategies))


def _recorder(model: Any, strategies: Sequence[Strategy]) -> Recorder | None:
    """What records the steps of a model, if no request forbids it."""
    allowed = all(strategy.config.cuda_graphs for strategy in strategies)
    return recorder_for(next(model.parameters()).device) if allowed else None
