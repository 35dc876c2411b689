"""A connection: HTTP by h11, with timeouts for slow clients, and errors in the form of all others."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import sys
import uuid
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ftk.serving.refusal import Refusal

request_log = logging.getLogger("ftk.serving.requests")
"""A JSON object per request; never a text or a key."""

_RESET = struct.pack("ii", 1, 0)


class Connection(H11Protocol):
    """uvicorn's, which by itself waits without end for a request and for a reader.

    Args:
        arguments, more: as uvicorn gives them.
        read_timeout: seconds until a request must be there, from the connection's start or the last answer on.
        write_timeout: seconds until a client must have read what is kept for it; then it is dropped.
    """

    def __init__(self, *arguments: Any, read_timeout: float, write_timeout: float, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.read_timeout, self.write_timeout = read_timeout, write_timeout
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The timer runs exactly while something is unsent: also of a connection that closes once it is sent.
        transport.set_write_buffer_limits(high=0)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        self._stop_writing_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_reading_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            self._expect_request()

    def send_400_response(self, msg: str) -> None:
        """Called where h11 refuses what a client has sent."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(status, f"not a valid HTTP request: {error or msg}")

    def _expect_request(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self.read_timeout, self._no_request)

    def _no_request(self) -> None:
        self._reading = None
        if self.conn.their_state is h11.SEND_BODY and not self.cycle.response_complete:
            return  # the guard waits for this body, and answers
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(408, f"the headers did not come within {self.read_timeout:g} seconds")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answers what has not become a request, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            identity, body = uuid.uuid4().hex, json.dumps(Refusal(status, message).body).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
                (b"x-request-id", identity.encode()),
            ]
            head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            request_log.info(json.dumps({"id": identity, "method": None, "route": None, "status": status}))
        self.transport.close()

    def _expect_reader(self) -> None:
        if self._writing is None:
            self._writing = self.loop.call_later(self.write_timeout, self._no_reader)

    def _no_reader(self) -> None:
        self._writing = None
        if self.transport.get_write_buffer_size():
            # By a reset: else the kernel keeps what it has of the answer, megabytes, for minutes.
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing_timer(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
