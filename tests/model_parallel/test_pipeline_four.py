"""Pipelines of four processes against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.model_parallel import pipeline_steps as steps

pytestmark = pytest.mark.slow

FOUR: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe, uneven": {"pipeline_schedule": "gpipe", "pipeline_layers": [1, 1, 1, 2]},
    "zero-bubble": {"pipeline_schedule": "zero-bubble"},
    "interleaved": {"pipeline_schedule": "interleaved", "options": {"num_layers": 8}},
    "zero-bubble, interleaved, uneven": {
        "pipeline_schedule": "zero-bubble",
        "pipeline_stages_per_rank": 2,
        "pipeline_layers": [1, 1, 1, 1, 1, 1, 1, 2],
        "options": {"num_layers": 9},
    },
}


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> tuple[Path, steps.References]:
    folder = tmp_path_factory.mktemp("references")
    return folder, steps.write_references(folder, FOUR)


@pytest.fixture(scope="module")
def of_four(references) -> list[dict[str, Any]]:
    return run_ranks(steps.run_cases, 4, str(references[0]), FOUR, timeout=300)


@pytest.mark.parametrize("name", FOUR)
def test_four_processes_learn_what_one_does(name, of_four, references):
    steps.check(name, FOUR[name], of_four, references[1])
