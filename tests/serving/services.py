"""A service without HTTP, ways to ask it, and causal models for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

import ftk
from ftk.models import build_model
from ftk.serving import completions, fill
from ftk.serving.app import routes
from ftk.serving.config import ServeConfig
from ftk.serving.service import Service
from ftk.tokenizers import load_tokenizer
from tests.small_run import SHAPE, save_model

PROMPTS = ["the quick [MASK] fox", "a lazy dog [MASK] she reads [MASK] letters", "old friends"]


def serving(
    generator: Any,
    use: Callable[[Service], Awaitable[Any]],
    load: Callable[[], Any] | None = None,
    share: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Any:
    """What `use` returns, beside a service of the generator."""

    async def go() -> Any:
        service = Service(ServeConfig(**options), "run", load or (lambda: generator), share)
        service.worker.start()
        if load is None:
            await service.loaded.wait()
        try:
            return await use(service)
        finally:
            service.worker.stop()
            await service.ended.wait()

    return asyncio.run(go())


async def whole(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    asked = completions.read(body, service)
    return [event async for event in completions.events(asked, service)][-1]


async def filled(service: Service, body: dict[str, Any]) -> list[dict[str, Any]]:
    prompts, stream = fill.read(body, service)
    return [event async for event in fill.events(prompts, stream, service)]


@contextlib.contextmanager
def held(service: Service):
    """The engine's thread waits inside."""
    may_go = threading.Event()
    service.worker.call(may_go.wait, {}, lambda: True)
    try:
        yield
    finally:
        may_go.set()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


async def posted(service: Service, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and content of what the routes answer."""
    status, content = await sent_back(service, path, body, [])
    return status, json.loads(content)


async def sent_back(service: Service, path: str, body: dict[str, Any], sent: list[Any]) -> tuple[int, bytes]:
    received = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()  # the client stays

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await routes(service)(scope, receive, send)
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent[1:])


def causal(folder: Path, tokenizer: Path, **task: Any) -> Any:
    """The generator of a small causal model with a tokenizer, trained in a task."""
    shape = {"vocab_size": load_tokenizer(tokenizer).padded_vocab_size(), **SHAPE}
    torch.manual_seed(0)
    save_model(folder / "checkpoint_1", build_model("gpt2", **shape), tokenizer, task=task or {"_name": "causal_lm"})
    return ftk.load_generator(folder, max_len=8, batch_size=2)
