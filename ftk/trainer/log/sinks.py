"""Sinks for the records of a run besides `metrics.jsonl`: TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from ftk.config import dump
from ftk.errors import UserError
from ftk.files import read_json, write_whole
from ftk.report.config import ReportConfig
from ftk.trainer.config import TrainConfig
from ftk.trainer.log.records import Record, RecordFile
from ftk.trainer.state import TrainerState

logger = logging.getLogger(__name__)

_KEYS = ("event", "subset", "num_updates")  # fields that identify a record, and are no figures


class RecordSink(Protocol):
    """Receives the records of a run in order; of a continued run, those after the checkpoint."""

    def write(self, record: Record) -> None:
        """Write a training or validation record."""

    def close(self) -> None:
        """No more records will come."""


class RecordSinks:
    """Several sinks as one. The first error of a sink is logged, and the sink is removed: it must not end the run."""

    def __init__(self, sinks: Iterable[RecordSink]) -> None:
        self._sinks = list(sinks)

    def write(self, record: Record) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(record)
            except Exception as error:
                self._drop(sink, error)

    def close(self) -> None:
        for sink in list(self._sinks):
            try:
                sink.close()
            except Exception as error:
                self._drop(sink, error)
        self._sinks = []

    def _drop(self, sink: RecordSink, error: Exception) -> None:
        self._sinks.remove(sink)
        name, cause = type(sink).__name__, f"{type(error).__name__}: {error}"
        logger.error("%s takes no more records (%s); the run continues without it", name, cause)


class TensorBoardSink:
    """Scalars `train/loss`, `valid/loss`, `valid_SPLIT/loss` … over updates, in event files.

    Args:
        num_updates: updates done; later records of an earlier process are hidden.

    Raises:
        UserError: the package tensorboard is missing.
    """

    def __init__(self, folder: str, num_updates: int = 0) -> None:
        # Each process has its own event file; steps from purge_step on in earlier files are ignored.
        self._writer = _tensorboard().SummaryWriter(folder, purge_step=num_updates + 1 if num_updates else None)

    def write(self, record: Record) -> None:
        for name, value in figures(record).items():
            self._writer.add_scalar(name, value, record["num_updates"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases over `num_updates`; a continued run keeps its id.

    The step axis is the figure `num_updates`, since wandb's own step cannot go back to a checkpoint.

    Args:
        folder: of the run; its name is the name of the run in wandb, and it holds wandb's files and `wandb_run.json`
            with the id.
        config: the run's configuration as plain dicts.

    Raises:
        UserError: the package wandb is missing, or it cannot start a run.
    """

    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        wandb = _wandb()
        known = folder / "wandb_run.json"
        options: dict[str, Any] = {"project": project, "name": folder.resolve().name, "dir": str(folder)}
        options |= {"config": config, "resume": "allow", "id": _read_id(known, project)}
        try:
            self._run = wandb.init(**options)
        except Exception as error:  # no key, no network: wandb's errors have no common class in all its versions
            cause = " ".join(str(error).split())
            raise UserError(f"`wandb_project` {project}: {cause}; WANDB_MODE=offline needs no account") from error
        write_whole(known, json.dumps({"project": project, "id": self._run.id}) + "\n")
        self._run.define_metric("num_updates")
        self._run.define_metric("*", step_metric="num_updates")

    def write(self, record: Record) -> None:
        self._run.log({"num_updates": record["num_updates"], **figures(record)})

    def close(self) -> None:
        self._run.finish()


def figures(record: Record) -> dict[str, float]:
    """The numbers of a record under their full names: {"train/loss": 5.1, ...}; null and text are left out."""
    subset = record.get("subset", record["event"])
    prefix = record["event"] if subset == record["event"] else f"{record['event']}_{subset}"
    return {
        f"{prefix}/{name}": value
        for name, value in record.items()
        if name not in _KEYS and isinstance(value, int | float) and not isinstance(value, bool)
    }


def check_packages(config: ReportConfig) -> None:
    """Refuse a run with a sink whose package is missing, before the run creates any file.

    Raises:
        UserError: names the package and what installs it.
    """
    if config.tensorboard_dir is not None:
        _tensorboard()
    if config.wandb_project is not None:
        _wandb()


def open_records(config: TrainConfig, folder: Path, state: TrainerState) -> RecordSinks:
    """Open `metrics.jsonl` and the sinks of the configuration, whose packages are imported only then.

    Raises:
        UserError: a package is missing.
    """
    pending = state.validation_pending
    sinks: list[RecordSink] = [RecordFile(folder / "metrics.jsonl", state.num_updates, validation_pending=pending)]
    if config.report.tensorboard_dir is not None:
        sinks.append(TensorBoardSink(config.report.tensorboard_dir, state.num_updates))
    if config.report.wandb_project is not None:
        sinks.append(WandbSink(config.report.wandb_project, folder, dump(config)))
    return RecordSinks(sinks)


def _tensorboard() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise UserError(
            "`tensorboard_dir` needs the package tensorboard; install it by: pip install 'ftk[tensorboard]'"
        ) from error


def _wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise UserError("`wandb_project` needs the package wandb; install it by: pip install 'ftk[wandb]'") from error


def _read_id(path: Path, project: str) -> str | None:
    """The id of the run in this project, if an earlier process has logged to it."""
    try:
        known = read_json(path)
    except (OSError, ValueError):
        return None
    is_ours = isinstance(known, dict) and known.get("project") == project
    return str(known["id"]) if is_ours and "id" in known else None
