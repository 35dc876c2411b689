"""Options of the service; imports neither torch nor starlette."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(kw_only=True)
class ServeConfig:
    """Where the service listens, and how much it takes on."""

    host: str = field(
        default="127.0.0.1",
        metadata={"daily": True, "help": "address to listen at; others than this machine's own need an API key"},
    )
    port: int = field(
        default=8000, metadata={"daily": True, "help": "port to listen at; 0 takes a free one and prints it"}
    )
    model_name: str | None = field(
        default=None, metadata={"help": "what clients call the model; if not given, the name of its folder"}
    )
    adapters: list[str] = field(
        default_factory=list,
        metadata={
            "help": "LoRA adapters beside the model, each in the folder of an adapter alone; a request whose `model` "
            "is NAME is answered with that adapter",
            "several": True,
            "metavar": "NAME=FOLDER",
        },
    )
    allowed_hosts: list[str] = field(
        default_factory=list,
        metadata={
            "help": "further host names that requests may use, in addition to the address and this machine's own"
        },
    )
    api_key_file: str | None = field(
        default=None,
        metadata={"help": "file with a key per line, one of which requests must carry; or variable FTK_API_KEY"},
    )
    open_access: bool = field(default=False, metadata={"help": "listen at any address without a key"})
    max_context: int | None = field(
        default=None,
        metadata={
            "help": "longest prompt with its answers; if not given the model's positions, at most 4096",
            "unit": "tokens",
        },
    )
    max_waiting: int = field(
        default=128, metadata={"help": "prompts that may wait for a row; further ones are answered by 429"}
    )
    max_prompts: int = field(default=32, metadata={"help": "answers that one request may ask for"})
    max_body: int = field(default=2_000_000, metadata={"help": "largest body of a request", "unit": "bytes"})
    request_timeout: float = field(
        default=600.0, metadata={"help": "longest wait for the last part of an answer", "unit": "seconds"}
    )
    read_timeout: float = field(
        default=30.0,
        metadata={
            "help": "longest wait for the headers of a request, and then for its body; also of an idle connection",
            "unit": "seconds",
        },
    )
    write_timeout: float = field(
        default=30.0,
        metadata={"help": "longest wait for a client that does not read its answer", "unit": "seconds"},
    )
    stall_timeout: float = field(
        default=300.0,
        metadata={"help": "time in one step of the model after which /livez is answered by 503", "unit": "seconds"},
    )
    drain_timeout: float = field(
        default=30.0,
        metadata={
            "help": "time that running requests get to end after SIGTERM, while new ones are refused",
            "unit": "seconds",
        },
    )

    def adapter_folders(self) -> dict[str, str]:
        """Name -> folder."""
        return {name: folder for name, _, folder in (one.partition("=") for one in self.adapters)}

    def validate(self) -> Iterator[str]:
        for one in self.adapters:
            name, _, folder = one.partition("=")
            if not name or not folder:
                yield f"adapters: {one} must be NAME=FOLDER"
        if len(self.adapter_folders()) < len(self.adapters):
            yield "adapters: two have the same name"
        if not 0 <= self.port <= 65535:
            yield f"port is {self.port}; it must be from 0 (a free one) to 65535"
        for name in ("max_waiting", "max_prompts", "max_body"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"
        if self.max_context is not None and self.max_context < 2:
            yield f"max_context is {self.max_context}; it must be at least 2"
        for name in ("request_timeout", "read_timeout", "write_timeout", "stall_timeout", "drain_timeout"):
            if not 0.0 < getattr(self, name) < float("inf"):
                yield f"{name} is {getattr(self, name)}; it must be above 0 and finite"
