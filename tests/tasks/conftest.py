"""Checkpoints that the tasks' tests start from, and runs that do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ftk.trainer.log.records import Record
from ftk_cli import train
from tests.records import records_of
from tests.tasks.cloze.made import make_model
from tests.tasks.runs import learning


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Callable[[str], Path]:
    """A function that gives a checkpoint of a family, made once."""
    folder, made = tmp_path_factory.mktemp("bases"), {}

    def base(name: str) -> Path:
        if name not in made:
            made[name] = make_model(folder / name, name)
        return made[name]

    return base


@pytest.fixture
def learn(here) -> Callable[..., list[Record]]:
    """learn(task, data, base, run, *flags) trains, in this process; gives the records of the run."""

    def run(task: str, data: Path, base: Path, save_dir: Path, *flags: object) -> list[Record]:
        here(train.main, data, *learning(task, base), "--save-dir", save_dir, *flags, code=0)
        return records_of(save_dir)

    return run
