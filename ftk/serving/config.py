"""Options of the service; imports neither torch nor starlette."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(kw_only=True)
class ServeConfig:
    """Where the service listens, and how much it takes on."""

    host: str = option("127.0.0.1", "address to listen at; others than this machine's own need an API key", daily=True)
    port: int = option(8000, "port to listen at; 0 takes a free one and prints it", daily=True, min=0, max=65535)
    model_name: str | None = option(None, "what clients call the model; if not given, the name of its folder")
    adapters: list[str] = option(
        [],
        "LoRA adapters of the model, each in a folder of its own; requests for the model NAME are answered with it",
        daily=True,
        several=True,
        metavar="NAME=FOLDER",
    )
    models: list[str] = option(
        [],
        "further models, each with rows and memory of its own; requests for the model NAME are answered by it",
        daily=True,
        several=True,
        metavar="NAME=FOLDER",
    )
    allowed_hosts: list[str] = option(
        [], "further host names that requests may use, in addition to the address and this machine's own"
    )
    cors_origins: list[str] = option(
        [], "origins whose pages may ask this service in a browser, such as https://app.example", several=True
    )
    api_key_file: str | None = option(
        None, "file with a key per line, one of which requests must carry; or variable FTK_API_KEY"
    )
    open_access: bool = option(False, "listen at any address without a key")
    metrics_public: bool = option(False, "answer /metrics without a key")
    playground: bool = option(True, "answer / by the page")
    max_context: int | None = option(
        None, "longest prompt with its answers; if not given the model's positions, at most 4096", min=2, unit="tokens"
    )
    max_waiting: int = option(128, "prompts that may wait for a row; further ones are answered by 429", min=1)
    max_prompts: int = option(32, "answers that one request may ask for", min=1)
    max_body: int = option(2_000_000, "largest body of a request", min=1, unit="bytes")
    request_timeout: float = option(600.0, "longest wait for the last part of an answer", "(0, inf)", unit="seconds")
    read_timeout: float = option(
        30.0,
        "longest wait for the headers of a request, and then for its body; also of an idle connection",
        "(0, inf)",
        unit="seconds",
    )
    write_timeout: float = option(
        30.0, "longest wait for a client that does not read its answer", "(0, inf)", unit="seconds"
    )
    stall_timeout: float = option(
        300.0, "time in one step of the model after which /livez is answered by 503", "(0, inf)", unit="seconds"
    )
    drain_timeout: float = option(
        30.0,
        "time that running requests get to end after SIGTERM, while new ones are refused",
        "(0, inf)",
        unit="seconds",
    )

    def adapter_folders(self) -> dict[str, str]:
        """Name -> folder."""
        return _folders(self.adapters)

    def model_folders(self) -> dict[str, str]:
        """Name -> folder."""
        return _folders(self.models)

    def validate(self) -> Iterator[str]:
        for option_, folders in (("adapters", self.adapters), ("models", self.models)):
            for entry in folders:
                name, _, folder = entry.partition("=")
                if not name or not folder:
                    yield f"{option_}: {entry} must be NAME=FOLDER"
            if len(_folders(folders)) < len(folders):
                yield f"{option_}: two have the same name"
        for name in self.adapter_folders().keys() & self.model_folders().keys():
            yield f"models: {name} is the name of an adapter, too"
        for origin in self.cors_origins:
            if not re.fullmatch(r"https?://[^/*\s]+", origin):
                yield f"cors_origins: {origin} must be an address without a path, such as https://app.example"


def _folders(named: list[str]) -> dict[str, str]:
    return {name: folder for name, _, folder in (entry.partition("=") for entry in named)}
