"""`--inspect-interval` and `--detect-anomaly` on several processes see what they see on one."""

from __future__ import annotations

import json
import math
import re
import shlex

import pytest

from tests.distributed import run_jobs
from tests.tiers import slow_but, wants_slow
from tests.trainer.parallel_jobs import run_all

# Batches of even lengths: those of an odd length get a token more where a sequence is shared out by two.
FLAGS = (
    "--arch glm_tiny --device cpu --num-layers 4 --hidden-size 32 --dropout 0 --attention-dropout 0 "
    "--embedding-dropout 0 --lr 1e-3 --warmup-updates 1 --seq-length 32 --log-interval 1 --log-format json --no-save "
    "--pad-to-multiple 2 --max-update 3 --valid-subset '' --batch-size 4"
)
LOOK = "--inspect-interval 3"
BREAK = "--max-update 2 --detect-anomaly --user-dir {plugin} --hooks"
FORWARD = f"{BREAK} 'break_at module=layers.2.feed_forward place=forward'"
BACKWARD = f"{BREAK} 'break_at module=layers.1.attention place=backward'"

# Name: processes, flags.
ONE, R, S = "--update-freq 2", "", "--data-parallel-shard-size 2"
T, P = "--update-freq 2 --tensor-parallel-size 2", "--update-freq 2 --pipeline-parallel-size 2"
INTERLEAVED = f"{P} --pipeline-schedule interleaved --pipeline-stages-per-rank 2"
RUNS = {
    "look": (1, f"{ONE} {LOOK}"),
    "look S2": (2, f"{S} {LOOK}"),
    "look T2 sequence": (2, f"{T} --sequence-parallel {LOOK}"),
    "look P2 interleaved": (2, f"{INTERLEAVED} {LOOK} --activation-checkpointing full"),
    "look at four": (1, f"--update-freq 4 {LOOK}"),
    "look at four P2 S2": (4, f"{P} {S} {LOOK}"),
    "look T2 R2": (4, f"--tensor-parallel-size 2 {LOOK}"),
    "forward": (1, f"{ONE} {FORWARD}"),
    "forward R2": (2, f"{R} {FORWARD}"),
    "forward S2": (2, f"{S} {FORWARD}"),
    "forward S2 once": (2, f"{S} {FORWARD[:-1]} data_rank=1'"),
    "forward T2": (2, f"{T} {FORWARD}"),
    "backward S2 checkpointed": (2, f"{S} {BACKWARD} --activation-checkpointing full"),
    "backward P2": (2, f"{P} {BACKWARD}"),
}
# Before each commit: what each way of sharing adds.
QUICK = (
    "look", "look S2", "look T2 sequence", "look P2 interleaved",
    "forward", "forward S2 once", "forward T2", "backward P2",
)  # fmt: skip

PLUGIN = """
from dataclasses import dataclass, field

import torch

from ftk.model_parallel.shards import canonical_name
from ftk.registry import register_hook
from ftk.trainer.hooks import Hook
from tests.trainer.toy import Explode


@dataclass(kw_only=True)
class BreakAtConfig:
    module: str = field(default="", metadata={"help": "which one breaks in the second update"})
    place: str = field(default="forward", metadata={"help": "forward or backward"})
    data_rank: int = field(default=-1, metadata={"help": "where alone it does; -1: everywhere"})


@register_hook("break_at", config=BreakAtConfig)
class BreakAt(Hook):
    def __init__(self, config):
        self.config = config
        self.on = False

    def before_train(self, step):
        for name, module in step.model.named_modules():
            if canonical_name(name, step.model) == self.config.module:
                module.register_forward_hook(self.broken)

    def broken(self, module, arguments, output):
        if not self.on:
            return output
        return output * float("inf") if self.config.place == "forward" else Explode.apply(output)

    def before_step(self, step, micro_batches):
        here = self.config.data_rank in (-1, step.world.data_rank)
        self.on = here and step.num_updates == 1
"""


@pytest.fixture(scope="module")
def runs(data_bin, tmp_path_factory, request):
    """Folder of all runs, each of which has its own with its log in it."""
    folder = tmp_path_factory.mktemp("looking")
    (folder / "plugin.py").write_text(PLUGIN)
    wanted = RUNS if wants_slow(request) else {name: RUNS[name] for name in QUICK}
    for size in sorted({size for size, _ in wanted.values()}):
        names = [name for name, (of, _) in wanted.items() if of == size]
        jobs = []
        for name in names:
            flags = shlex.split(f"{FLAGS} {RUNS[name][1]}".format(plugin=folder / "plugin.py"))
            log = ["--log-file", str(folder / name / "log.txt")]
            jobs.append([str(data_bin), *flags, "--save-dir", str(folder / name), *log])
        done = run_jobs(run_all, size, jobs)
        assert done.returncode == 0, done.stderr
    return folder


def inspected(folder, name):
    (line,) = (folder / name / "inspect.jsonl").read_text().splitlines()
    return json.loads(line)


LOOKS = [name for name, (size, _) in RUNS.items() if name.startswith("look") and size > 1]


@pytest.mark.parametrize("name", slow_but(QUICK, LOOKS))
def test_the_figures_of_all_processes_are_those_of_one(runs, name):
    alone = "look at four" if "four" in name else "look"
    one, several = inspected(runs, alone), inspected(runs, name)
    assert one["num_updates"] == several["num_updates"] == 3
    for kind in ("parameters", "modules"):
        assert set(several[kind]) == set(one[kind])
        assert len(one[kind]) > 20
        for row, figures in one[kind].items():
            scale = max(abs(figures["min"]), abs(figures["max"]))
            gradients = max(abs(figures.get("grad_min", 0.0)), abs(figures.get("grad_max", 0.0)))
            for figure, value in figures.items():
                size = gradients if figure.startswith("grad") else scale
                close = math.isclose(several[kind][row][figure], value, rel_tol=2e-4, abs_tol=2e-4 * size + 1e-9)
                assert close, (row, figure, several[kind][row][figure], value)
    assert len(re.findall(r"^layers\.3\.feed_forward\S* ", (runs / name / "log.txt").read_text(), re.MULTILINE)) > 2


def anomalies(folder, name):
    lines = (folder / name / "log.txt").read_text().splitlines()
    return [line.partition("anomaly in ")[2] for line in lines if "anomaly in " in line]


@pytest.mark.parametrize("name", slow_but(QUICK, [name for name in RUNS if re.match("(for|back)ward", name)]))
def test_the_module_that_breaks_is_named(runs, name):
    alone = "2" not in name
    found = anomalies(runs, name)
    ranks = [0, 1] if re.search("[RS]2", name) else [0]  # each with its own batches
    ranks = [1] if name.endswith("once") else ranks
    what = "in the forward pass: the output of layers.2.feed_forward (FeedForward) has "
    if name.startswith("backward"):
        what = "in the backward pass of layers.1.attention (Attention): the gradient of its input has "
    wheres = [""] if alone else [f"rank {rank}, " for rank in ranks]
    assert len(found) == len(wheres), found
    for where, text in zip(wheres, found, strict=True):
        assert text.startswith(f"update 2, epoch 1: {where}{what}")
