"""ftk-env: prints what a bug report needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ftk.config import compose, section
from ftk.errors import visible
from ftk_cli.command import run

DESCRIPTION = """Prints versions, machine and settings: what a bug report needs. Values that may be secret are hidden.
Example: ftk-env > environment.txt"""


@dataclass(kw_only=True)
class EnvConfig:
    json: bool = field(default=False, metadata={"help": "print JSON, for programs"})


@dataclass(kw_only=True)
class EnvCommand:
    env: EnvConfig = section("environment")


def main(argv: Sequence[str] | None = None) -> int:
    return run("ftk-env", body, argv)


def body(argv: list[str]) -> None:
    config = compose(EnvCommand, "ftk-env", DESCRIPTION, argv)

    from ftk.report.environment import collect, lines, to_json

    environment = collect()
    print(to_json(environment) if config.env.json else visible("\n".join(lines(environment))))
