"""What every request passes first: its host, key and size; and the line that the log gets of it."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import TYPE_CHECKING, Any

from ftk.serving.app import reply
from ftk.serving.config import LOOPBACK
from ftk.serving.connection import request_log
from ftk.serving.refusal import Refusal, request_id

if TYPE_CHECKING:
    from ftk.serving.metrics import Metrics

logger = logging.getLogger(__name__)

MOST_HEADER_BYTES = 65536

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

PROBED_ROUTES = ("/livez", "/readyz", "/health")
"""Routes exempt from the Host check: an orchestrator's probe sends the address of its pod."""

OPEN_ROUTES = ("/", *PROBED_ROUTES)
"""Routes that need no key; a list of these, so that a new route is never open by accident."""


class Guard:
    """An ASGI application around another.

    Args:
        app: answers what passes.
        metrics: count requests.
        hosts: host names that a request may use (against DNS rebinding); None: any.
        keys: one of which a request must carry; empty: none. They may be replaced at any time.
        max_body: largest body in bytes.
        read_timeout: seconds until a body must be there.
        known_routes: paths that metrics name; others count as "other".
        open_routes: paths that need no key.
        origins: whose pages may ask, besides those of `hosts`.
    """

    def __init__(
        self,
        app: App,
        metrics: Metrics,
        hosts: Collection[str] | None,
        keys: Collection[str],
        max_body: int,
        read_timeout: float,
        known_routes: Collection[str],
        open_routes: Collection[str] = OPEN_ROUTES,
        origins: Collection[str] = (),
    ) -> None:
        self.app, self.metrics, self.hosts, self.keys, self.max_body = app, metrics, hosts, keys, max_body
        self.known_routes, self.read_timeout = known_routes, read_timeout
        self.open_routes, self.origins = open_routes, origins

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, identity = time.monotonic(), 0, uuid.uuid4().hex
        request_id.set(identity)

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", identity.encode())]
            await send(message)

        try:
            await self._pass(scope, receive, counted_send)
        except Exception:  # Starlette has answered by 500, and raises it again
            logger.exception("request %s failed", identity)
        finally:  # also of a client that leaves
            self._log(scope, status, identity, time.monotonic() - began)

    def _log(self, scope: MutableMapping[str, Any], status: int, identity: str, seconds: float) -> None:
        """Counts a request, and writes its line."""
        path = scope["path"]
        # Of /v1/models/{name:path} and the like.
        beginnings = [(route, route.partition("{")) for route in self.known_routes]
        found = (route for route, (start, rest, _) in beginnings if path == start or (rest and path.startswith(start)))
        route = next(found, "other")
        self.metrics.requests.labels(route, str(status)).inc()
        line = {"id": identity, "method": scope["method"], "route": route, "status": status}
        request_log.info(json.dumps({**line, "seconds": round(seconds, 4)}))

    async def _pass(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        try:
            self._check(scope, headers)
        except Refusal as error:
            await reply(error.body, error.status, error.headers)(scope, receive, send)
            return
        size, is_whole, ends = 0, False, time.monotonic() + self.read_timeout

        async def counted_receive() -> Message:
            nonlocal size, is_whole
            if is_whole:  # the wait for the client to leave has no end
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), ends - time.monotonic())
            except asyncio.TimeoutError:  # another class in Python 3.10
                text = f"the body did not come within {self.read_timeout:g} seconds"
                raise Refusal(408, text, headers={"connection": "close"}) from None
            is_whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self.max_body:  # whatever a Content-Length has said
                raise Refusal(413, f"the body has more than {self.max_body:,} bytes", headers={"connection": "close"})
            return message

        await self.app(scope, counted_receive, send)

    def _check(self, scope: MutableMapping[str, Any], headers: dict[bytes, list[bytes]]) -> None:
        if sum(len(name) + sum(map(len, values)) for name, values in headers.items()) > MOST_HEADER_BYTES:
            # h11 refuses larger ones only where they come in several pieces.
            text = f"the headers have more than {MOST_HEADER_BYTES:,} bytes"
            raise Refusal(431, text, headers={"connection": "close"})
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # Programs in between may count such a request otherwise, and take its end for another one.
            raise Refusal(400, "Content-Length and Transfer-Encoding together", headers={"connection": "close"})
        host = headers.get(b"host", [b""])
        name = _host_name(host[0].decode("latin-1"))
        is_probe = scope["path"] in PROBED_ROUTES
        if self.hosts is not None and not is_probe and (len(host) > 1 or name not in self.hosts):
            raise Refusal(403, f"the host name {name!r} is not allowed; add it to `allowed_hosts`")
        origin = headers.get(b"origin", [b""])[0].decode("latin-1")  # of the page that asks, where a browser does
        site = _host_name(origin.partition("://")[2])
        if self.hosts is not None and origin not in ("", *self.origins) and site not in self.hosts:
            text = "add its host to `allowed_hosts`, or all of it to `cors_origins`"
            raise Refusal(403, f"pages of {origin!r:.200} may not ask this service; {text}")
        if self.keys and scope["path"] not in self.open_routes:
            self._check_key(headers)
        if scope["method"] == "POST":
            length = headers.get(b"content-length", [b"0"])[0]
            if not length.isdigit() or int(length) > self.max_body:
                raise Refusal(413, f"the body has more than {self.max_body:,} bytes", headers={"connection": "close"})

    def _check_key(self, headers: dict[bytes, list[bytes]]) -> None:
        given = headers.get(b"authorization", [b""])[0]
        key = given[len(b"bearer ") :].strip() if given[:7].lower() == b"bearer " else b""
        # All are compared, in a time that does not depend on where they differ.
        matches = [secrets.compare_digest(key, known.encode()) for known in self.keys]
        if not any(matches):
            raise Refusal(
                401,
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def allowed_hosts(host: str, others: Collection[str]) -> set[str] | None:
    """Host names that a request may use; None: any, where the service listens at all addresses."""
    if host in ("0.0.0.0", "::", "") and not others:
        return None
    return {host.lower(), *LOOPBACK, *(other.lower() for other in others)}
