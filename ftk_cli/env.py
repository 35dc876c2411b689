"""ftk-env: prints what a bug report needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ftk.config.options import option
from ftk.errors import visible
from ftk_cli.command import compose_options, run

DESCRIPTION = """Prints versions, machine and settings: what a bug report needs. Values that may be secret are hidden.
Example: ftk-env > environment.txt"""


@dataclass(kw_only=True)
class EnvConfig:
    json: bool = option(False, "print JSON, for programs")


def main(argv: Sequence[str] | None = None) -> int:
    return run("ftk-env", body, argv)


def body(argv: list[str]) -> None:
    config = compose_options(EnvConfig, "ftk-env", DESCRIPTION, argv)

    from ftk.report.environment import collect, lines

    environment = collect()
    as_json = json.dumps(environment, indent=2, ensure_ascii=False)
    print(as_json if config.json else visible("\n".join(lines(environment))))


if __name__ == "__main__":
    raise SystemExit(main())
