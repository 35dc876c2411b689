"""Reports during a run: throughput in the records, and with `report` the page of ftk-report in the run's folder."""

from __future__ import annotations

import functools
import logging

from ftk.errors import UserError
from ftk.model_parallel.collective import on_main
from ftk.model_parallel.world import World
from ftk.report.config import ReportConfig
from ftk.report.page import report_html, write_page
from ftk.report.runs import read_run
from ftk.trainer.hooks import Hook, StepInfo
from ftk.trainer.log.records import Record
from ftk.trainer.log.sinks import check_packages
from ftk.trainer.log.summary import Summary
from ftk.trainer.watch.throughput import Throughput

logger = logging.getLogger(__name__)


def report_hooks(config: ReportConfig, world: World) -> list[Hook]:
    """The hooks for reports; the main rank writes the page.

    Raises:
        UserError: a package for TensorBoard or Weights & Biases is missing.
    """
    on_main(world, functools.partial(check_packages, config))
    return [Throughput(config.peak_tflops), *([RunReport()] if config.report and world.is_main else [])]


class RunReport(Hook):
    """Writes `report.html` after the update that follows a validation, and at the end.

    With many records the page takes long to draw; validations are skipped so that it takes at most 2 % of the time.
    """

    def __init__(self) -> None:
        self._due = False
        self._not_before = 0.0  # time of the run

    def after_validation(self, step: StepInfo, results: dict[str, Record]) -> None:
        self._due = True  # its records are not written yet

    def after_step(self, step: StepInfo) -> None:
        if not self._due:
            return
        self._due = False
        began = step.stopwatch.seconds()
        if began >= self._not_before:
            with step.stopwatch.aside(), step.stopwatch.part("log"):
                self._write(step)
            ended = step.stopwatch.seconds()
            self._not_before = ended + 49 * (ended - began)

    def after_train(self, step: StepInfo, summary: Summary) -> None:
        self._write(step)
        logger.info("report: %s", step.folder / "report.html")

    def _write(self, step: StepInfo) -> None:
        folder = step.folder
        try:
            write_page(folder / "report.html", report_html([read_run(folder)], "ftk-train --report"))
        except UserError as error:  # such as a full disk, which must not end the run
            logger.error("%s", error)
