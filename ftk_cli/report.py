"""ftk-report: draws the figures of runs as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ftk.errors import counted, visible
from ftk_cli.command import compose_options, run

DESCRIPTION = """Draws the curves of one or several runs, what differs in their configurations, and their environment,
as one HTML page that needs no network.
Example: ftk-report run-1 run-2 --output report.html"""


@dataclass(kw_only=True)
class ReportCommandConfig:
    runs: list[str] = field(
        metadata={"help": "folders of runs (--save-dir)", "positional": True, "metavar": "RUN", "path": True}
    )
    output: str = field(default="report.html", metadata={"help": "page to write", "metavar": "FILE"})

    def validate(self) -> Iterator[str]:
        if not self.output:
            yield "output is empty; it must name a file"


def main(argv: Sequence[str] | None = None) -> int:
    return run("ftk-report", body, argv)


def body(argv: list[str]) -> None:
    config = compose_options(ReportCommandConfig, "ftk-report", DESCRIPTION, argv)

    from ftk.report.page import write_report
    from ftk.report.runs import read_runs

    runs = read_runs(config.runs)
    write_report(Path(config.output), runs, f"ftk-report {' '.join(argv)}")
    names = [f"{one.name} ({counted(one.num_records, 'record')})" for one in runs]
    print(visible(f"{config.output}: {', '.join(names)}"))


if __name__ == "__main__":
    raise SystemExit(main())
