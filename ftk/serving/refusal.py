"""What a client is told when a request is refused: a status and OpenAI's form of an error."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}


FAILURE = "the service failed; its log says why, by the request's id"

request_id: ContextVar[str] = ContextVar("request_id", default="without id")
"""Of the request that this task answers, for the log."""


class Refusal(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP, 400 to 599.
        message: what is wrong, and how to mend it.
        param: the field of the request that is meant.
        code: for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
