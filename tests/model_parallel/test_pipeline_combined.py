"""Pipelines with tensor, sequence and data parallel on four processes against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.model_parallel import pipeline_steps as steps

pytestmark = pytest.mark.slow

COMBINED: dict[str, dict[str, Any]] = {
    "P2 S2": {"pipeline_parallel_size": 2, "data_parallel_shard_size": 2},
    "P2 S2 interleaved": {
        "pipeline_parallel_size": 2,
        "data_parallel_shard_size": 2,
        "pipeline_schedule": "interleaved",
    },
    "P2 S2 zero-bubble, chunked loss": {
        "pipeline_parallel_size": 2,
        "data_parallel_shard_size": 2,
        "pipeline_schedule": "zero-bubble",
        "options": {"loss_form": "chunked"},
    },
    "P2 S2 interleaved, in bf16": {
        "pipeline_parallel_size": 2,
        "data_parallel_shard_size": 2,
        "pipeline_schedule": "interleaved",
        "weights": "bf16",
        "reduce_dtype": "bf16",
        "limit": 0.1,
    },
    "P2 R2, offloaded": {"pipeline_parallel_size": 2, "data_parallel_replicate_size": 2, "cpu_offload": True},
    "P2 T2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "P2 T2 sequence": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
    "P2 T2 sequence interleaved": {
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_schedule": "interleaved",
        "engine": {"activation_checkpointing": "full"},
    },
}


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> tuple[Path, steps.References]:
    folder = tmp_path_factory.mktemp("references")
    return folder, steps.write_references(folder, COMBINED)


@pytest.fixture(scope="module")
def of_four(references) -> list[dict[str, Any]]:
    return run_ranks(steps.run_cases, 4, str(references[0]), COMBINED, timeout=300)


@pytest.mark.parametrize("name", COMBINED)
def test_four_processes_learn_what_one_does(name, of_four, references):
    steps.check(name, COMBINED[name], of_four, references[1])
