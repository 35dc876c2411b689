"""Runs of several processes end where the run of one process ends: the last update of an epoch may be a short one."""

from __future__ import annotations

import json
import math
import shlex

import pytest

from tests.distributed import run_jobs
from tests.trainer.parallel_jobs import run_all

FLAGS = (
    "--arch glm_tiny --device cpu --num-layers 2 --dropout 0 --attention-dropout 0 --embedding-dropout 0 --lr 1e-3 "
    "--seq-length 48 --log-interval 1 --log-format json --max-epoch 2 --max-valid-samples 8"
)
# Name: processes, their flags. 9 batches an epoch: an update of 4, one of 4, and one of what is left.
RUNS = {
    "alone": (1, "--update-freq 4"),
    "R2": (2, "--update-freq 2"),
    "P2": (2, "--update-freq 4 --pipeline-parallel-size 2"),
}


@pytest.fixture(scope="module")
def logs(data_bin, tmp_path_factory, command):
    """Name -> the records of the run."""
    folder = tmp_path_factory.mktemp("ends")
    flags = [str(data_bin), *shlex.split(FLAGS)]
    told = command("ftk-train", *flags, "--batch-size", 1, "--save-dir", folder / "none", "--dry-run").stdout
    samples = int(
        next(line for line in told.splitlines() if line.startswith("samples per epoch")).split()[-1].replace(",", "")
    )
    flags += ["--batch-size", str(math.ceil(samples / 9))]
    for size in (1, 2):
        names = [name for name, (of, _) in RUNS.items() if of == size]
        jobs = [[*flags, *shlex.split(RUNS[name][1]), "--save-dir", str(folder / name)] for name in names]
        done = run_jobs(run_all, size, jobs)
        assert done.returncode == 0, done.stderr
    read = {name: (folder / name / "metrics.jsonl").read_text().splitlines() for name in RUNS}
    return {name: [json.loads(line) for line in lines] for name, lines in read.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if name != "alone"])
def test_the_last_short_update_of_the_last_epoch_is_taken_and_validated(logs, name):
    shown = [[(line["event"], line["num_updates"], line["epoch"]) for line in lines] for lines in logs.values()]
    assert shown[0] == [
        *[("train", update, 1) for update in (1, 2, 3)],
        ("valid", 3, 1),
        *[("train", update, 2) for update in (4, 5, 6)],
        ("valid", 6, 2),
    ]
    assert shown[list(RUNS).index(name)] == shown[0]
    for one, several in zip(logs["alone"], logs[name], strict=True):
        assert math.isclose(one["loss"], several["loss"], rel_tol=1e-5)
