"""Requests to a server of OpenAI's form: sent at given times, timed event by event, summed up in vLLM's keys."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

MOST_LINE = 1 << 22  # bytes of an event
MEASURES = ("ttft", "tpot", "itl", "e2el")


class Target(NamedTuple):
    """Where requests go.

    Attributes:
        port: on this machine.
        body: what every request holds.
    """

    port: int
    body: Mapping[str, Any]


@dataclass
class Outcome:
    """What came of a request.

    Attributes:
        began: when it was sent, by `time.perf_counter`.
        ended: when its last byte came, or it was given up.
        status: "completed", "shed" (429 or 503), "cancelled" (by this client) or "failed".
        error: why it failed.
        events: when each event with text came.
        prompt_tokens, completion_tokens: as the server counts them.
    """

    began: float
    ended: float = 0.0
    status: str = "failed"
    error: str = ""
    events: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0


async def ask(target: Target, body: Mapping[str, Any], cancel_after: float | None = None) -> Outcome:
    """Streams one answer of /v1/completions.

    Args:
        target: where.
        body: of the request, without `stream`.
        cancel_after: seconds until the connection is closed.
    """
    outcome = Outcome(time.perf_counter())
    try:
        await asyncio.wait_for(_stream(target, body, outcome), cancel_after)
    except asyncio.TimeoutError:
        outcome.status = "cancelled"
    except (OSError, EOFError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.ended = time.perf_counter()
    return outcome


async def _stream(target: Target, body: Mapping[str, Any], outcome: Outcome) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=MOST_LINE)
    try:
        content = json.dumps({**target.body, **body, "stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\n" + f"Content-Length: {len(content)}\r\n\r\n".encode() + content
        )
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        head = await reader.readuntil(b"\r\n\r\n")
        if status != 200:
            outcome.status = "shed" if status in (429, 503) else "failed"
            outcome.error = f"{status}: {(await reader.read(MOST_LINE))[:300]!r}"
            return
        if b"chunked" not in head.lower():
            raise ValueError("the answer is not sent in chunks")
        async for event in _events(reader):
            _take(event, outcome)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _take(event: bytes, outcome: Outcome) -> None:
    """Notes what an event says."""
    if event == b"[DONE]":
        return
    found = json.loads(event)
    if "error" in found:
        raise ValueError(str(found["error"]))
    if usage := found.get("usage"):
        outcome.prompt_tokens, outcome.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        outcome.status = "completed"
    if any(choice.get("text") for choice in found["choices"]):
        outcome.events.append(time.perf_counter())


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events in a chunked body."""
    rest = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        rest += await reader.readexactly(size)
        await reader.readexactly(2)
        *whole, rest = rest.split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                yield event[len(b"data: ") :]


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from each request to the next: a Poisson process of `rate` requests/s."""
    draw = random.Random(seed)
    while True:
        yield 0.0 if rate == float("inf") else draw.expovariate(rate)


async def load(
    target: Target,
    bodies: Iterable[Mapping[str, Any]],
    *,
    rate: float = float("inf"),
    clients: int | None = None,
    seed: int = 0,
) -> tuple[list[Outcome], float]:
    """Sends requests at random times, whether earlier ones are answered or not.

    Args:
        target: where.
        bodies: of the requests.
        rate: requests/s.
        clients: requests that run at the same time at most; None: any number.
        seed: of the times.

    Returns:
        outcomes in the order of arrival, and the seconds from the first request to the last answer.
    """
    free = asyncio.Semaphore(clients or 2**31)
    began = time.perf_counter()
    at = began

    async def one(body: Mapping[str, Any]) -> Outcome:
        async with free:
            return await ask(target, body)

    tasks = []
    for body, pause in zip(bodies, arrivals(rate, seed), strict=False):
        at += pause  # not from now on: a late client sends its requests closer together, but as many
        if (left := at - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.ensure_future(one(body)))
    outcomes = await asyncio.gather(*tasks)
    return outcomes, time.perf_counter() - began


def latencies(outcome: Outcome) -> dict[str, list[float]]:
    """Milliseconds of a completed request by measure; an answer without text has no first token."""
    e2el = outcome.ended - outcome.began
    found = {"ttft": [], "tpot": [], "itl": np.diff(outcome.events).tolist(), "e2el": [e2el]}
    if outcome.events:
        ttft = outcome.events[0] - outcome.began
        found["ttft"] = [ttft]
        if outcome.completion_tokens > 1:
            found["tpot"] = [(e2el - ttft) / (outcome.completion_tokens - 1)]
    return {name: [1e3 * value for value in values] for name, values in found.items()}


def figures(outcomes: Sequence[Outcome], seconds: float, goodput: Mapping[str, float]) -> dict[str, Any]:
    """Counts, rates and latencies, by the keys of the result files of `vllm bench serve`.

    Args:
        outcomes: of a load.
        seconds: that it took.
        goodput: measure -> most milliseconds that a good request has; empty: no goodput.

    Returns:
        `tokens_per_event` besides, since gaps between events (itl) are per token only where it is 1.
    """
    completed = [one for one in outcomes if one.status == "completed"]
    times = [latencies(one) for one in completed]
    read, written = (sum(getattr(one, f"{name}_tokens") for one in completed) for name in ("prompt", "completion"))
    found: dict[str, Any] = {"duration": seconds, "num_prompts": len(outcomes)}
    found |= {
        name: sum(one.status == name for one in outcomes) for name in ("completed", "shed", "failed", "cancelled")
    }
    found |= {"total_input_tokens": read, "total_output_tokens": written}
    found |= {"request_throughput": len(completed) / seconds, "output_throughput": written / seconds}
    found["total_token_throughput"] = (read + written) / seconds
    found["tokens_per_event"] = written / max(1, sum(len(one.events) for one in completed))
    if goodput:
        good = sum(all(max(own[name], default=0.0) <= most for name, most in goodput.items()) for own in times)
        found["request_goodput"] = good / seconds
    for name in MEASURES:
        values = np.asarray([value for own in times for value in own[name]] or [np.nan])
        found[f"mean_{name}_ms"], found[f"median_{name}_ms"] = float(values.mean()), float(np.median(values))
        found[f"std_{name}_ms"] = float(values.std())
        for share in (90, 99):
            found[f"p{share}_{name}_ms"] = float(np.percentile(values, share))
    found["errors"] = sorted({one.error for one in outcomes if one.error})[:10]
    return found
