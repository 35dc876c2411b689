"""Runs that differ by their seeds alone, as one setting: mean and deviation of their best validations."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ftk.errors import UserError
from ftk.files import as_user_error, write_whole
from ftk.report.larger_is_better import larger_is_better
from ftk.report.page import value_text
from ftk.report.runs import Run
from ftk.report.tables import best
from ftk.terminal import in_columns

_OF_ONE_RUN = ("common.seed", "checkpoint.save_dir")
_WITHOUT_EFFECT = ("report.", "logging.")


class Setting(NamedTuple):
    """Runs with the same options.

    Attributes:
        options: in which the settings differ.
        values: folder of each run -> the figure at its best validation; NaN without one.
    """

    options: Mapping[str, Any]
    values: Mapping[str, float]

    @property
    def finite(self) -> dict[str, float]:
        """The runs that have a figure."""
        return {folder: value for folder, value in self.values.items() if math.isfinite(value)}

    @property
    def mean(self) -> float:
        """Of the runs that have a figure; NaN where none has."""
        return statistics.fmean(self.finite.values()) if self.finite else math.nan

    @property
    def deviation(self) -> float:
        """Of a sample (divided by n - 1), of the runs that have a figure; NaN of fewer than two."""
        return statistics.stdev(self.finite.values()) if len(self.finite) > 1 else math.nan


class Settings(NamedTuple):
    """The settings of several runs.

    Attributes:
        metric: the figure that ranks their checkpoints, of the first validation split.
        maximize: whether larger is better.
        found: the best mean first; those without one last.
    """

    metric: str
    maximize: bool
    found: Sequence[Setting]

    def lines(self) -> list[str]:
        """A table, and the best setting."""
        names = list(self.found[0].options)
        rows = [(*names, "runs", self.metric, "deviation", "best run")]
        for setting in self.found:
            folder = self._best_run(setting)
            numbers = (f"{value:.4f}" if math.isfinite(value) else "–" for value in (setting.mean, setting.deviation))
            which = "–" if folder is None else f"{setting.values[folder]:.4f} {folder}"
            counted = (
                str(len(setting.values))
                if setting.finite.keys() == setting.values.keys()
                else f"{len(setting.finite)} of {len(setting.values)}"
            )
            rows.append((*(value_text(setting.options[name]) for name in names), counted, *numbers, which))
        lines = in_columns(rows, left=(*range(len(names)), len(rows[0]) - 1))
        if names and math.isfinite(self.found[0].mean):
            chosen = ", ".join(f"{name} {value_text(value)}" for name, value in self.found[0].options.items())
            others = sum(setting.mean == self.found[0].mean for setting in self.found) - 1
            tie = f"; {others} more with the same mean" if others else ""
            lines.append(f"best mean {self.metric}: {self.found[0].mean:.4f} with {chosen}{tie}")
        return lines

    def write(self, path: Path) -> None:
        """Write them as JSON; what is not finite becomes null.

        Raises:
            UserError: the file cannot be written.
        """
        content = {
            "metric": self.metric,
            "maximize": self.maximize,
            "settings": [
                {
                    "options": setting.options,
                    "runs": {folder: _finite(value) for folder, value in setting.values.items()},
                    "mean": _finite(setting.mean),
                    "deviation": _finite(setting.deviation),
                    "best_run": self._best_run(setting),
                }
                for setting in self.found
            ],
        }
        with as_user_error(path, "cannot be written"):
            write_whole(path, json.dumps(content, indent=2, default=str) + "\n")

    def _best_run(self, setting: Setting) -> str | None:
        finite = setting.finite
        return (max if self.maximize else min)(finite, key=finite.__getitem__) if finite else None


def settings_of(runs: Sequence[Run]) -> Settings:
    """The settings of runs, by the metric that ranks their checkpoints.

    Args:
        runs: at least one.

    Raises:
        UserError: they have different metrics.
    """
    all_options = [run.options() for run in runs]
    metrics = [str(options.get("checkpoint.best_metric", "loss")) for options in all_options]
    ranked = [
        (metric, bool(options.get("checkpoint.maximize_best_metric", False)) or larger_is_better(metric))
        for metric, options in zip(metrics, all_options, strict=True)
    ]
    for run, ranking in zip(runs, ranked, strict=True):
        if ranking != ranked[0]:
            (first, _), (other, _) = ranked[0], ranking
            raise UserError(
                f"no table of settings: `best_metric` is {first} of {runs[0].folder} and {other} of {run.folder}, or "
                f"larger is better in one alone; compare runs of one metric"
            )
    metric, maximize = ranked[0]
    names = [name for name in dict.fromkeys(name for options in all_options for name in options) if _separates(name)]
    # An option of one schedule alone says nothing that the schedule's name does not say.
    differing = [name for name in names if len({str(own[name]) for own in all_options if name in own}) > 1]
    grouped: dict[str, tuple[dict[str, Any], dict[str, float]]] = {}
    for run, options in zip(runs, all_options, strict=True):
        values = {name: options.get(name) for name in differing}
        _, found = grouped.setdefault(json.dumps(values, default=str), (values, {}))
        found[str(run.folder)] = best(run, metric, maximize)[0]
    settings = [Setting(*group) for group in grouped.values()]
    settings.sort(key=lambda setting: (math.isnan(setting.mean), -setting.mean if maximize else setting.mean))
    return Settings(metric, maximize, settings)


def _separates(option: str) -> bool:
    """Whether runs with different values are of different settings."""
    return option not in _OF_ONE_RUN and not option.startswith(_WITHOUT_EFFECT)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
