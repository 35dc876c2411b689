"""ftk-data: looks at data folders. One body per subcommand; the work is done in `ftk.data`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ftk.config import compose, section
from ftk.errors import UserError
from ftk_cli.frame import Body, run, subcommands


@dataclass(kw_only=True)
class FolderConfig:
    data: str = field(
        metadata={"help": "folder written by ftk-preprocess", "positional": True, "metavar": "DATA-BIN"}
    )


@dataclass(kw_only=True)
class FolderCommand:
    data: FolderConfig = section("data")


def main(argv: Sequence[str] | None = None) -> int:
    return run(
        "ftk-data", subcommands("ftk-data", "Looks at the data that ftk-preprocess wrote.", COMMANDS), argv
    )


def stats_body(argv: list[str]) -> int:
    from ftk.data.inspect_data import stats

    config = compose(FolderCommand, "ftk-data stats", "Counts and a histogram of document lengths.", argv)
    print(stats(config.data.data))
    return 0


def verify_body(argv: list[str]) -> int:
    from ftk.data.inspect_data import verify

    config = compose(FolderCommand, "ftk-data verify", "Checks the files against preprocess.json.", argv)
    problems = verify(config.data.data)
    if problems:
        raise UserError("\n".join([f"{config.data.data}: {len(problems)} things are wrong", *problems]))
    print(f"{config.data.data}: all files are as ftk-preprocess wrote them")
    return 0


COMMANDS: dict[str, tuple[str, Body]] = {
    "stats": ("counts and a histogram of document lengths", stats_body),
    "verify": ("checks the files against preprocess.json", verify_body),
}
