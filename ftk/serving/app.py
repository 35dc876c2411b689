"""The routes of the service, as a Starlette application behind a guard."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from ftk.errors import UserError
from ftk.serving import chat, completions, fill
from ftk.serving.fields import Fields, parsed
from ftk.serving.guides import GUIDE_FIELDS, field_of
from ftk.serving.metrics import text_of
from ftk.serving.page import page
from ftk.serving.prompts import check_length
from ftk.serving.refusal import FAILURE, Refusal, request_id
from ftk.version import __version__

if TYPE_CHECKING:
    from ftk.serving.service import Service

R = TypeVar("R")

logger = logging.getLogger(__name__)

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_MOST_IDS = 100_000  # to be written as a text
_MOST_BYTES_ON_LOOP = 4096
_SLOW_FIELDS = GUIDE_FIELDS | {"forbid_words", "constraints"}  # hundreds of texts in all their spellings
_PING = 15.0  # seconds


def routes(*services: Service) -> Starlette:
    """The application, without its guard; of several services the first has the requests that name no model."""
    opened = page()
    owners = {name: service for service in services for name in service.names}

    async def playground(request: Request) -> Response:
        return opened

    async def complete(request: Request) -> Response:
        asked, service = await _read(request, completions.read, owners)
        return await _answered(request, asked.stream, completions.events(asked, service))

    async def converse(request: Request) -> Response:
        asked, service = await _read(request, chat.read, owners)
        return await _answered(request, asked.stream, chat.events(asked, service))

    async def filled(request: Request) -> Response:
        (prompts, stream), service = await _read(request, fill.read, owners)
        return await _answered(request, stream, fill.events(prompts, stream, service))

    async def scored(request: Request) -> Response:
        values, service = await _read(request, lambda values, service: values, owners)
        return await _answered(request, False, fill.scores(values, service))

    async def cancelled(request: Request) -> Response:
        identity = request.path_params["id"]
        next((service for service in services if identity in service.inboxes), services[0]).cancel(identity)
        return Response(status_code=204)

    async def models(request: Request) -> Response:
        name = request.path_params.get("name")
        if name is not None:
            return reply(_described(name, _owner(name, owners)))
        return reply({"object": "list", "data": [_described(*item) for item in owners.items()]})

    async def tokenize(request: Request) -> Response:
        tokens, _ = await _read(request, _tokens, owners)
        return reply({"tokens": tokens, "count": len(tokens)})

    async def detokenize(request: Request) -> Response:
        text, _ = await _read(request, _text, owners)
        return reply({"prompt": text})

    async def live(request: Request) -> Response:
        return _state(services, lambda service: service.not_alive())

    async def ready(request: Request) -> Response:
        full = "the queue is full"
        return _state(services, lambda service: service.not_ready() or (full if service.is_full() else None))

    async def health(request: Request) -> Response:  # for programs that know one route alone: red only where it is ill
        return _state(services, lambda service: service.not_alive() or service.not_ready())

    async def version(request: Request) -> Response:
        return reply({"version": __version__})

    async def metrics(request: Request) -> Response:
        of_models = {service.name: service.metrics for service in services}
        return Response(text_of(of_models), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            *([Route("/", playground)] if services[0].config.playground else []),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/chat/completions", converse, methods=["POST"]),
            Route("/v1/fill", filled, methods=["POST"]),
            Route("/v1/score", scored, methods=["POST"]),
            Route("/v1/requests/{id}", cancelled, methods=["DELETE"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", models),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/livez", live),
            Route("/readyz", ready),
            Route("/health", health),
            Route("/version", version),
            Route("/metrics", metrics),
        ],
        exception_handlers={
            Refusal: _refused,
            UserError: _mistaken,
            ClientDisconnect: _left,
            HTTPException: _not_routed,
            Exception: _failed,
        },
    )


def reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response, without NaN and infinity."""
    return Response(_json(body), status, headers, "application/json")


_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _state(services: Sequence[Service], problem_of: Callable[[Service], str | None]) -> Response:
    """The first problem that a service has; of several with the name of its model."""
    found = ((service.name, problem) for service in services if (problem := problem_of(service)) is not None)
    name, problem = next(found, ("", None))
    text = problem if len(services) == 1 else f"{name}: {problem}"
    return reply({"status": "ok" if problem is None else text}, 200 if problem is None else 503)


def _owner(model: Any, owners: Mapping[str, Service]) -> Service:
    """The service that a request asks by the name of a model.

    Raises:
        Refusal: 404; no model has this name.
    """
    if not isinstance(model, str):  # it names none, or the field is refused
        return next(iter(owners.values()))
    if model not in owners:
        raise Refusal(
            404, f"there is no model {model!r:.80}; there is: {', '.join(owners)}", "model", "model_not_found"
        )
    return owners[model]


def _described(name: str, service: Service) -> dict[str, Any]:
    parent = None if name == service.name else service.name
    found = {"id": name, "root": name, "parent": parent, "object": "model", "created": service.created}
    own = {} if service.generator is None else {"generation": fill.described(service.generator)}
    return {**found, "owned_by": "ftk", **own}


async def _read(
    request: Request, read: Callable[[dict[str, Any], Service], R], owners: Mapping[str, Service]
) -> tuple[R, Service]:
    """What a body asks for, and whom; a long one, or one with a guide to compile or words to spell, is read in a
    thread: it would hold up all streams."""

    def read_by_owner(values: dict[str, Any]) -> tuple[R, Service]:
        service = _owner(values.get("model"), owners)
        try:
            return read(values, service), service
        except Refusal as refusal:
            if refusal.param == "guide":  # the option, which most requests call otherwise
                refusal.param = field_of(values)
            raise

    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site cannot send this unasked
        raise Refusal(415, "the body must be JSON; send Content-Type: application/json")
    body = await request.body()
    if len(body) > _MOST_BYTES_ON_LOOP:
        return await asyncio.to_thread(lambda: read_by_owner(parsed(body)))
    values = parsed(body)
    if _SLOW_FIELDS.isdisjoint(values):
        return read_by_owner(values)
    return await asyncio.to_thread(read_by_owner, values)


def _tokens(values: dict[str, Any], service: Service) -> list[int]:
    fields = Fields(values)
    completions.model_of(fields, service)
    text, with_prefix = fields.text("prompt", ""), fields.flag("add_special_tokens", True)
    fields.end()
    tokenizer = service.admit().tokenizer
    check_length(service, len(text))
    return [*(tokenizer.prompt_prefix if with_prefix else ()), *tokenizer.encode(text)]


def _text(values: dict[str, Any], service: Service) -> str:
    fields = Fields(values)
    completions.model_of(fields, service)
    tokenizer = service.admit().tokenizer

    def ids(value: Any) -> list[int] | None:
        size = tokenizer.vocab_size
        is_right = isinstance(value, list) and all(type(token) is int and 0 <= token < size for token in value)
        return value if is_right and len(value) <= _MOST_IDS else None

    tokens = fields.take("tokens", ids, f"a list of ids below {tokenizer.vocab_size}", [])
    fields.end()
    return tokenizer.decode(tokens)


async def _answered(request: Request, stream: bool, events: AsyncGenerator[dict[str, Any], None]) -> Response:
    """The events of a request as one response; they end when the client leaves."""
    first = asyncio.ensure_future(anext(events))  # what is refused is refused by a status
    gone = asyncio.ensure_future(_client_leaves(request))
    has_left = True
    try:
        await asyncio.wait((first, gone), timeout=_PING if stream else None, return_when=asyncio.FIRST_COMPLETED)
        has_left = gone.done() and not first.done()
    finally:  # also where this task is cancelled
        gone.cancel()
        if has_left:
            first.cancel()
    if has_left:
        await asyncio.wait((first,))
        return await _left(request, ClientDisconnect())
    if not stream:
        async with aclosing(events):
            return reply(first.result())
    if first.done():
        first.result()
    return _Stream(_server_sent(first, events), headers=_STREAM_HEADERS, media_type="text/event-stream")


async def _client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream(StreamingResponse):
    """Sends a comment now and then, so that no proxy takes a stream that waits for dead."""

    async def stream_response(self, send: Send) -> None:
        async def ping() -> None:
            while True:
                await asyncio.sleep(_PING)
                await send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})

        pinging = asyncio.ensure_future(ping())
        try:
            await super().stream_response(send)
        finally:
            pinging.cancel()


async def _server_sent(
    first: asyncio.Future[dict[str, Any]], events: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[str, None]:
    """Server-sent events; an error is an event, too, unless it came before the response began."""
    async with aclosing(events):
        try:
            yield f"data: {_json(await first)}\n\n"
            async for event in events:
                yield f"data: {_json(event)}\n\n"
        except Exception as error:
            if not isinstance(error, Refusal):
                logger.exception("request %s: its stream broke off", request_id.get())
            yield f"data: {_json((error if isinstance(error, Refusal) else Refusal(500, FAILURE)).body)}\n\n"
            return
        yield "data: [DONE]\n\n"


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal), "Starlette gives this handler no other"
    return reply(error.body, error.status, error.headers)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the log: the client has closed the connection


async def _mistaken(request: Request, error: Exception) -> Response:
    return await _refused(request, Refusal(400, str(error)))


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "Starlette gives this handler no other"
    allowed = (error.headers or {}).get("allow") or (error.headers or {}).get("Allow")
    if error.status_code == 405:
        message = f"{request.method} is not for {request.url.path}; use {allowed}"
    else:
        message = f"there is no {request.url.path}"
    return await _refused(request, Refusal(error.status_code, message, headers={"allow": allowed} if allowed else {}))


async def _failed(request: Request, error: Exception) -> Response:
    return await _refused(request, Refusal(500, FAILURE))
