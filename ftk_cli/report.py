"""ftk-report: draws the figures of runs, or the results of evaluations, as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftk.config.options import option, required
from ftk.errors import UserError, counted, visible
from ftk_cli.command import compose_options, run

DESCRIPTION = """Draws the curves of one or several runs, what differs in their configurations, and their environment,
as one HTML page that needs no network; or compares what ftk-evaluate has found for several models.
Examples: ftk-report run-1 run-2 --output report.html; ftk-report results-1 results-2;
ftk-report runs/* --settings settings.json"""


@dataclass(kw_only=True)
class ReportCommandConfig:
    runs: list[str] = required(
        "folders of runs (--save-dir), or of results (ftk-evaluate --output)", positional=True, metavar="RUN", path=True
    )
    output: str = option("report.html", "page to write; one that ftk-report has written is replaced", metavar="FILE")
    overwrite: bool = option(False, "replace FILE also where something else has written it")
    settings: str | None = option(
        None,
        "print mean and deviation over the seeds of each setting, by the metric that ranks checkpoints, and write "
        "them into this file as JSON",
        metavar="FILE",
    )

    def validate(self) -> Iterator[str]:
        if not self.output:
            yield "output is empty; it must name a file"


def main(argv: Sequence[str] | None = None) -> int:
    return run("ftk-report", body, argv)


def body(argv: list[str]) -> None:
    config = compose_options(ReportCommandConfig, "ftk-report", DESCRIPTION, argv)

    from ftk.report.evaluations import RESULTS, evaluations_html, read_evaluated
    from ftk.report.page import check_page, report_html, write_page
    from ftk.report.runs import read_runs
    from ftk.report.settings import settings_of

    check_page(Path(config.output), config.overwrite)
    source = f"ftk-report {' '.join(argv)}"
    evaluated = [(Path(folder) / RESULTS).is_file() for folder in config.runs]
    if any(evaluated) and not all(evaluated):
        other = config.runs[evaluated.index(False)]
        raise UserError(f"{other} has no {RESULTS}, and other folders have; give runs, or results of ftk-evaluate")
    if config.settings is not None and any(evaluated):
        raise UserError("`settings` is for runs, and these are results of ftk-evaluate; leave it out")
    if any(evaluated):
        models = [read_evaluated(folder) for folder in config.runs]
        page, names = evaluations_html(models, source), [model.name for model in models]
    else:
        runs = read_runs(config.runs)
        page = report_html(runs, source)
        names = [f"{recorded.name} ({counted(recorded.num_records, 'record')})" for recorded in runs]
    write_page(Path(config.output), page)
    print(visible(f"{config.output}: {', '.join(names)}"))
    if config.settings is not None:
        found = settings_of(runs)
        found.write(Path(config.settings))
        print(visible("\n".join(found.lines())))


if __name__ == "__main__":
    raise SystemExit(main())
