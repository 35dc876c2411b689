"""Runs of `ftk-train` on several processes say what the run of one process says."""

from __future__ import annotations

import json
import math
import shlex

import pytest

from tests.torchrun import torchrun

TOLERANCE = 1e-5
OF_THE_MACHINE = ("seconds", "per_second", "_share", "memory", "mfu")  # figures that differ from run to run

MODEL = "--arch glm_tiny --device cpu --dropout 0 --attention-dropout 0 --embedding-dropout 0"
STEPS = "--lr 1e-3 --warmup-updates 3 --log-interval 1 --log-format json --no-save"
TEN = f"{MODEL} {STEPS} --seq-length 48 --max-update 10 --validate-interval-updates 5 --max-valid-samples 13"

# What is computed: the flags of all runs; those of one process.
COMPUTED = {
    "plain": (TEN, "--batch-size 4 --update-freq 2"),
    # Epochs end with a short group, and validation batches do not divide.
    "epochs": (
        f"{MODEL} {STEPS} --seq-length 48 --num-layers 2 --max-update 10 --max-valid-samples 11",
        "--batch-size 130 --update-freq 2",
    ),
    "tuned": (
        f"{TEN} --freeze position_embedding layers.1.attention_norm --lr-scales layers.2.*=0.5 --gradient-multipliers "
        "token_embedding=0.3 --layer-lr-decay 0.9 --ema-decay 0.9 --clip-norm 0.5 --label-smoothing 0.1",
        "--batch-size 4 --update-freq 2",
    ),
    # A stage of a pipeline has none of what the first or the second group takes.
    "composite": (
        f"{TEN} --optimizer composite --groups 'layers.0 = sgd lr=0.1 lr_scheduler=constant' 'layers.3 = lamb' "
        "'* = adamw'",
        "--batch-size 4 --update-freq 2",
    ),
    "bf16": (f"{TEN} --precision bf16 --activation-checkpointing full", "--batch-size 4 --update-freq 2"),
}
TOLERANCES = {"bf16": 2e-2}

# Name: what is computed, processes, their flags in place of those of one.
CASES = {
    "R2": ("plain", 2, "--batch-size 4"),
    "S2": ("plain", 2, "--batch-size 4 --data-parallel-shard-size 2"),
    "S2 zero 1": ("plain", 2, "--batch-size 2 --update-freq 2 --data-parallel-shard-size 2 --zero-stage 1"),
    "T2": ("plain", 2, "--batch-size 4 --update-freq 2 --tensor-parallel-size 2"),
    "T2 sequence": ("plain", 2, "--batch-size 4 --update-freq 2 --tensor-parallel-size 2 --sequence-parallel"),
    "P2": ("plain", 2, "--batch-size 4 --update-freq 2 --pipeline-parallel-size 2"),
    "P2 interleaved": (
        "plain",
        2,
        "--batch-size 4 --update-freq 2 --pipeline-parallel-size 2 --pipeline-schedule interleaved "
        "--pipeline-stages-per-rank 2 --pipeline-layers 1,1,1,1",
    ),
    "P2 zero-bubble": (
        "plain",
        2,
        "--batch-size 4 --update-freq 2 --pipeline-parallel-size 2 --pipeline-schedule zero-bubble "
        "--pipeline-layers 1,3",
    ),
    "R2 epochs": ("epochs", 2, "--batch-size 130"),
    "S2 epochs": ("epochs", 2, "--batch-size 130 --data-parallel-shard-size 2"),
    "P2 epochs": ("epochs", 2, "--batch-size 130 --update-freq 2 --pipeline-parallel-size 2"),
    "S2 tuned": ("tuned", 2, "--batch-size 4 --data-parallel-shard-size 2"),
    "T2 tuned": ("tuned", 2, "--batch-size 4 --update-freq 2 --tensor-parallel-size 2"),
    "P2 tuned": ("tuned", 2, "--batch-size 4 --update-freq 2 --pipeline-parallel-size 2"),
    "P2 composite": ("composite", 2, "--batch-size 4 --update-freq 2 --pipeline-parallel-size 2"),
    "S2 bf16": ("bf16", 2, "--batch-size 4 --data-parallel-shard-size 2"),
    "R4": ("plain", 4, "--batch-size 2"),
    "S2 R2": ("plain", 4, "--batch-size 2 --data-parallel-shard-size 2"),
    "T2 R2": ("plain", 4, "--batch-size 4 --tensor-parallel-size 2"),
    "T2 S2 sequence": (
        "plain",
        4,
        "--batch-size 4 --tensor-parallel-size 2 --data-parallel-shard-size 2 --sequence-parallel",
    ),
    "T2 P2": ("plain", 4, "--batch-size 4 --update-freq 2 --tensor-parallel-size 2 --pipeline-parallel-size 2"),
    "P2 S2": ("plain", 4, "--batch-size 2 --update-freq 2 --pipeline-parallel-size 2 --data-parallel-shard-size 2"),
    "R4 epochs": ("epochs", 4, "--batch-size 65"),
    "P2 R2 epochs": ("epochs", 4, "--batch-size 65 --update-freq 2 --pipeline-parallel-size 2"),
    "T2 S2 tuned": ("tuned", 4, "--batch-size 4 --tensor-parallel-size 2 --data-parallel-shard-size 2"),
    "T2 P2 tuned": ("tuned", 4, "--batch-size 4 --update-freq 2 --tensor-parallel-size 2 --pipeline-parallel-size 2"),
}


@pytest.fixture(scope="module")
def logs(data_bin, tmp_path_factory):
    """Name -> the records that the run of this name has logged; all runs of a size in one start of its processes."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {name: (1, f"{flags} {own}") for name, (flags, own) in COMPUTED.items()}
    runs |= {name: (size, f"{COMPUTED[computed][0]} {own}") for name, (computed, size, own) in CASES.items()}
    records = {}
    for size in (1, 2, 4):
        names = [name for name, (of, _) in runs.items() if of == size]
        jobs = [[str(data_bin), "--save-dir", str(folder / name), *shlex.split(runs[name][1])] for name in names]
        done = torchrun(size, "-m", "tests.trainer.parallel_jobs", json.dumps(jobs), timeout=600)
        assert done.returncode == 0, done.stderr
        for line in map(json.loads, done.stdout.splitlines()):
            if "job" in line:
                current = records.setdefault(names[line["job"]], [])
            else:
                current.append(line)
    return records


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_several_processes_says_what_one_process_says(logs, name):
    computed, *_ = CASES[name]
    expected, found = logs[computed], logs[name]
    assert [line["event"] for line in found] == [line["event"] for line in expected]
    assert len([line for line in found if line["event"] == "train"]) >= 10
    assert len([line for line in found if line["event"] == "valid"]) >= 2
    for one, several in zip(expected, found, strict=True):
        assert several.keys() == one.keys()
        for figure, value in one.items():
            if figure == "num_batches" or any(part in figure for part in OF_THE_MACHINE if figure != "clip_share"):
                continue
            if not isinstance(value, float):
                assert several[figure] == value, figure
            else:
                tolerance = TOLERANCES.get(computed, TOLERANCE)
                assert math.isclose(several[figure], value, rel_tol=tolerance), (figure, several[figure], value)


def test_the_comparison_sees_a_difference(logs):
    losses = {computed: [line["loss"] for line in logs[computed]] for computed in COMPUTED}
    assert abs(losses["plain"][9] - losses["tuned"][9]) > 1e-3
    assert abs(losses["plain"][9] - losses["bf16"][9]) > 1e-5
    assert {line["epoch"] for line in logs["epochs"]} >= {1, 2}
