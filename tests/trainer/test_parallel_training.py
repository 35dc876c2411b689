"""Runs of `ftk-train` on several processes say what the run of one process says."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from omegaconf import OmegaConf

from ftk.model_parallel.config import ParallelConfig
from tests.tiers import slow_but, wants_slow
from tests.trainer.parallel_jobs import run_records, samples_per_epoch

TOLERANCE = 1e-5
OF_THE_MACHINE = ("seconds", "per_second", "_share", "memory", "mfu")  # figures that differ from run to run

MODEL = "--arch glm_tiny --device cpu --dropout 0 --attention-dropout 0 --embedding-dropout 0"
STEPS = "--lr 1e-3 --warmup-updates 3 --log-interval 1 --log-format json --no-save"
SIX = f"{MODEL} {STEPS} --seq-length 48 --max-update 6 --validate-interval-updates 3 --max-valid-samples 13"

FREQ = "--batch-size 4 --update-freq 2"

# What is computed: the flags of all runs; those of one process.
COMPUTED = {
    "plain": (SIX, FREQ),
    # Each epoch has 9 batches: its last update has one, and so has that of the run. Validation batches do not divide.
    "epochs": (
        f"{MODEL} {STEPS} --seq-length 48 --num-layers 2 --max-epoch 2 --max-valid-samples 11",
        "--batch-size NINTH --update-freq 2",
    ),
    "tuned": (
        f"{SIX} --freeze position_embedding layers.1.attention_norm --lr-scales layers.2.*=0.5 --gradient-multipliers "
        "token_embedding=0.3 --layer-lr-decay 0.9 --ema-decay 0.9 --clip-norm 0.5 --label-smoothing 0.1",
        FREQ,
    ),
    "bf16": (f"{SIX} --precision bf16 --activation-checkpointing full --num-layers 2", FREQ),
    "plain of two layers": (f"{SIX} --num-layers 2", FREQ),
    # All batches have one shape, so that there is one graph of each kind to compile.
    "even": (f"{SIX} --num-layers 2 --pad-to-multiple 48 --max-valid-samples 16", FREQ),
    "plain of nine layers": (f"{SIX} --num-layers 9", FREQ),
    "fp16": (f"{SIX} --precision fp16 --num-layers 2", FREQ),
    "bf16 residual": (f"{SIX} --precision bf16 --residual-precision same --num-layers 2", FREQ),
    # Without dropout of attention weights, which tensor parallel processes have other heads of.
    "dropout": (f"{SIX} --dropout 0.1 --embedding-dropout 0.1", FREQ),
}
# By name or by what is computed. Single precision is further from bf16: see below.
TOLERANCES = {"bf16": 1e-3, "bf16 residual": 1e-3, "P2 bf16 residual": 1e-4, "fp16": 3e-4}

BATCH, HALF = "--batch-size 4", "--batch-size 2"
S = f"{BATCH} --data-parallel-shard-size 2"
T, P = f"{FREQ} --tensor-parallel-size 2", f"{FREQ} --pipeline-parallel-size 2"
P4, TP = f"{HALF} --update-freq 4 --pipeline-parallel-size 4", f"{T} --pipeline-parallel-size 2"
PR = f"{HALF} --update-freq 2 --pipeline-parallel-size 2"
PS = f"{PR} --data-parallel-shard-size 2"
GPIPE, INTERLEAVED, ZERO_BUBBLE = (f"--pipeline-schedule {name}" for name in ("gpipe", "interleaved", "zero-bubble"))
# Name: what is computed, processes, their flags in place of those of one.
CASES = {
    "R2": ("plain", 2, BATCH),
    "S2": ("plain", 2, S),
    "S2 zero 1": ("plain", 2, f"{HALF} --update-freq 2 --data-parallel-shard-size 2 --zero-stage 1"),
    "T2": ("plain", 2, f"{T} --collective-timeout-minutes 5"),
    "T2 sequence": ("plain", 2, f"{T} --sequence-parallel"),
    "P2": ("plain", 2, P),
    "P2 interleaved": ("plain", 2, f"{P} {INTERLEAVED} --pipeline-stages-per-rank 2 --pipeline-layers 1,1,1,1"),
    "P2 zero-bubble": ("plain", 2, f"{P} {ZERO_BUBBLE} --pipeline-layers 1,3"),
    "R2 epochs": ("epochs", 2, "--batch-size NINTH --find-unused-parameters"),
    "S2 epochs": ("epochs", 2, "--batch-size NINTH --data-parallel-shard-size 2"),
    "P2 epochs": ("epochs", 2, "--batch-size NINTH --update-freq 2 --pipeline-parallel-size 2"),
    "S2 tuned": ("tuned", 2, f"{S} --zero-stage 3 --weights fp32"),
    "T2 tuned": ("tuned", 2, T),
    "P2 tuned": ("tuned", 2, P),
    "S2 bf16": ("bf16", 2, S),
    "T2 bf16": ("bf16", 2, T),
    "P2 bf16": ("bf16", 2, P),
    "R2 bf16": ("bf16", 2, BATCH),
    "T2 bf16 residual": ("bf16 residual", 2, f"{T} --sequence-parallel"),
    "P2 bf16 residual": ("bf16 residual", 2, P),
    "S2 fp16": ("fp16", 2, S),
    "T2 fp16": ("fp16", 2, T),
    "P2 fp16": ("fp16", 2, P),
    "R2 tuned": ("tuned", 2, BATCH),
    "T2 dropout": ("dropout", 2, T),
    "S2 zero 2": ("plain", 2, f"{HALF} --update-freq 2 --data-parallel-shard-size 2 --zero-stage 2"),
    "S2 offload": ("plain", 2, f"{S} --cpu-offload"),
    "T2 offload": ("plain", 2, f"{T} --cpu-offload"),
    "P2 offload": ("plain", 2, f"{P} --cpu-offload"),
    "S2 selective": ("plain", 2, f"{S} --activation-checkpointing selective"),
    "P2 gpipe": ("plain", 2, f"{P} {GPIPE}"),
    "P2 selective": ("plain", 2, f"{P} --activation-checkpointing selective"),
    "P2 uneven": ("plain", 2, f"{P} --pipeline-layers 1,3 --loss-form chunked"),
    "P2 interleaved uneven": ("plain of nine layers", 2, f"{P} {INTERLEAVED} --pipeline-layers 2,3,2,2"),
    "P2 zero-bubble chunked": ("plain", 2, f"{P} {ZERO_BUBBLE} --loss-form chunked"),
    "P2 zero-bubble interleaved": (
        "plain",
        2,
        f"{P} {ZERO_BUBBLE} --pipeline-stages-per-rank 2 --activation-checkpointing full",
    ),
    "T2 sequence compiled full": (
        "even",
        2,
        f"{T} --sequence-parallel --compile block --activation-checkpointing full",
    ),
    "S2 compiled": ("plain of two layers", 2, f"{S} --compile block"),
    "P2 compiled": ("plain of two layers", 2, f"{P} --compile block"),
    "S2 compiled whole": ("even", 2, f"{S} --compile model"),
    "R2 compiled whole": ("plain of two layers", 2, f"{BATCH} --compile model"),
    "T2 compiled whole": ("even", 2, f"{T} --compile model"),
    "R4": ("plain", 4, HALF),
    "S4": ("plain", 4, f"{HALF} --data-parallel-shard-size 4"),
    "T4": ("plain", 4, f"{FREQ} --tensor-parallel-size 4"),
    "P4": ("plain", 4, P4),
    "P4 gpipe uneven": ("plain of nine layers", 4, f"{P4} {GPIPE} --pipeline-layers 2,2,2,3"),
    "P4 zero-bubble": ("plain", 4, f"{P4} {ZERO_BUBBLE}"),
    "P4 interleaved": ("plain of nine layers", 4, f"{P4} {INTERLEAVED}"),
    "P4 zero-bubble interleaved": (
        "plain of nine layers",
        4,
        f"{P4} {ZERO_BUBBLE} --pipeline-stages-per-rank 2 --pipeline-layers 1,1,1,1,1,1,1,2",
    ),
    "S2 R2": ("plain", 4, f"{HALF} --data-parallel-shard-size 2"),
    "T2 R2": ("plain", 4, f"{BATCH} --tensor-parallel-size 2"),
    "T2 S2 sequence": ("plain", 4, f"{S} --tensor-parallel-size 2 --sequence-parallel"),
    "T2 P2 sequence": ("plain", 4, f"{TP} --sequence-parallel"),
    "T2 P2 sequence interleaved": (
        "plain",
        4,
        f"{TP} --sequence-parallel {INTERLEAVED} --activation-checkpointing full",
    ),
    "P2 S2": ("plain", 4, PS),
    "P2 S2 interleaved": ("plain", 4, f"{PS} {INTERLEAVED}"),
    "P2 S2 zero-bubble chunked": ("plain", 4, f"{PS} {ZERO_BUBBLE} --loss-form chunked"),
    "P2 R2": ("plain", 4, PR),
    "P2 R2 offload": ("plain", 4, f"{PR} --cpu-offload"),
    "S2 R2 tuned": ("tuned", 4, f"{HALF} --data-parallel-shard-size 2 --data-parallel-replicate-size 2"),
    "R4 epochs": ("epochs", 4, "--batch-size EIGHTEENTH"),
    "P2 R2 epochs": ("epochs", 4, "--batch-size EIGHTEENTH --update-freq 2 --pipeline-parallel-size 2"),
    "T2 S2 tuned": ("tuned", 4, f"{S} --tensor-parallel-size 2"),
    "T2 P2 tuned": ("tuned", 4, TP),
}


# What they send is rounded or approximated: near to what one process says, and not the same.
APPROXIMATE = {
    "R2 compressed": ("plain", 2, f"{BATCH} --gradient-compression bf16"),
    **{
        f"{name} halves": ("plain", 2, f"{own} --weights bf16") for name, own in {"R2": BATCH, "S2": S, "T2": T}.items()
    },
    "P2 halves": ("plain", 2, f"{P} --weights bf16 --precision bf16"),
    "P2 S2 halves": ("plain", 4, f"{PS} {INTERLEAVED} --weights bf16 --reduce-dtype bf16"),
    "S2 reduced": ("plain", 2, f"{S} --reduce-dtype bf16 --prefetch-blocks 0"),
}

# Each process draws numbers of its own for its batches, layers and heads. Every one of these is run twice.
DRAWN = {
    f"{name} drawn": ("dropout", 2, f"{own} --attention-dropout 0.1")
    for name, own in {"R2": BATCH, "S2": S, "T2": T, "P2": P}.items()
}
DRAWN |= {f"{name} again": run for name, run in DRAWN.items()}

# Before each commit: each way of sharing, with what differs most between them.
QUICK = (
    "plain", "epochs", "tuned", "dropout",
    "R2", "T2 sequence", "S2 tuned", "P2 epochs", "P2 interleaved", "P2 zero-bubble", "T2 drawn", "T2 drawn again",
)  # fmt: skip


class Runs(NamedTuple):
    """What the runs have left, by name; run N has the folder N in `folder`."""

    records: dict[str, list[dict[str, Any]]]
    graphs: dict[str, int]  # compiled
    folder: Path


@pytest.fixture(scope="module")
def runs(data_bin, short_data_bin, tmp_path_factory, request, command):
    """All runs of a size on the same data are one start of its processes; those of whole epochs have little data."""
    folder = tmp_path_factory.mktemp("runs")
    half = math.ceil(samples_per_epoch(command, short_data_bin, *shlex.split(COMPUTED["epochs"][0])) / 18)
    wanted = {name: (1, f"{flags} {own}") for name, (flags, own) in COMPUTED.items()}
    for name, (computed, size, own) in (CASES | APPROXIMATE | DRAWN).items():
        wanted[name] = (size, f"{COMPUTED[computed][0]} {own}")
    if not wants_slow(request):
        wanted = {name: wanted[name] for name in QUICK}
    own = [
        (name, size, flags.replace("NINTH", str(2 * half)).replace("EIGHTEENTH", str(half)))
        for name, (size, flags) in wanted.items()
    ]
    short, long = ([run for run in own if ("epochs" in run[0]) == is_short] for is_short in (True, False))
    records, graphs = run_records(data_bin, folder, long)
    of_short, graphs_of_short = run_records(short_data_bin, folder, short)
    return Runs(records | of_short, graphs | graphs_of_short, folder)


def computed_figures(record):
    """Those that do not depend on the machine."""
    return {
        figure: value
        for figure, value in record.items()
        if figure == "clip_share" or not any(part in figure for part in OF_THE_MACHINE)
    }


def losses(records, event="train"):
    return [record["loss"] for record in records if record["event"] == event]


def largest_difference(records, others):
    """Of the gradient norms, relative: of all figures they show best what was rounded."""
    pairs = [(one["gnorm"], other["gnorm"]) for one, other in zip(records, others, strict=True) if "gnorm" in other]
    return max(abs(one - other) / other for one, other in pairs)


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_a_run_of_several_processes_says_what_one_process_says(runs, name):
    computed, *_ = CASES[name]
    expected, found = runs.records[computed], runs.records[name]
    assert [line["event"] for line in found] == [line["event"] for line in expected]
    assert len([line for line in found if line["event"] == "train"]) >= 6
    assert len([line for line in found if line["event"] == "valid"]) >= 2
    for one, several in zip(expected, found, strict=True):
        assert several.keys() == one.keys()
        for figure, value in computed_figures(one).items():
            if figure == "num_batches":
                continue
            if not isinstance(value, float):
                assert several[figure] == value, figure
            else:
                tolerance = TOLERANCES.get(name, TOLERANCES.get(computed, TOLERANCE))
                if figure.startswith("ppl"):  # exp of a loss, which is as near
                    tolerance *= math.log(value)
                assert math.isclose(several[figure], value, rel_tol=tolerance), (figure, several[figure], value)


def test_the_comparison_sees_a_difference(runs):
    assert abs(losses(runs.records["plain"])[5] - losses(runs.records["tuned"])[5]) > 1e-3
    assert abs(losses(runs.records["plain"])[5] - losses(runs.records["dropout"])[5]) > 1e-3


def test_each_epoch_ends_with_a_short_update_and_a_validation(runs):
    shown = [(line["event"], line["num_updates"], line["epoch"]) for line in runs.records["epochs"]]
    first, second = ([("train", update, epoch) for update in range(5 * epoch - 4, 5 * epoch + 1)] for epoch in (1, 2))
    assert shown == [*first, ("valid", 5, 1), *second, ("valid", 10, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "least"), [("bf16", TOLERANCES["bf16"]), ("fp16", TOLERANCE)])
def test_a_run_in_half_precision_is_none_in_single_precision(runs, precision, least):
    """In bf16 the tolerance of the comparison above would refuse it."""
    own = [precision, *(name for name, (computed, *_) in CASES.items() if computed == precision)]
    assert len(own) >= 4
    for name in own:
        assert largest_difference(runs.records[name], runs.records["plain of two layers"]) > least, name


@pytest.mark.slow
def test_blocks_were_compiled_where_that_was_asked_for(runs):
    compiled = {name for name, graphs in runs.graphs.items() if graphs}
    assert compiled == {name for name in runs.graphs if "compiled" in name} != set()


@pytest.mark.slow
@pytest.mark.parametrize("name", APPROXIMATE)
def test_a_run_that_rounds_what_it_sends_is_near_to_one_process(runs, name):
    computed, *_ = APPROXIMATE[name]
    assert 2 * TOLERANCE < largest_difference(runs.records[name], runs.records[computed]) < 1e-2


@pytest.mark.parametrize("name", slow_but(QUICK, [name for name in DRAWN if not name.endswith("again")]))
def test_a_run_with_dropout_is_the_same_twice(runs, name):
    first, again = runs.records[name], runs.records[f"{name} again"]
    assert [computed_figures(line) for line in first] == [computed_figures(line) for line in again]


@pytest.mark.slow
def test_numbers_are_drawn_by_batch_layer_and_head_and_not_by_how_parameters_are_shared(runs):
    drawn = {name: losses(runs.records[name]) for name in ("dropout", "R2 drawn", "S2 drawn", "T2 drawn", "P2 drawn")}
    assert drawn["S2 drawn"] == pytest.approx(drawn["R2 drawn"], rel=TOLERANCE)
    del drawn["S2 drawn"]
    for one, other in itertools.combinations(drawn.values(), 2):
        assert abs(one[0] - other[0]) > 1e-4


@pytest.mark.slow
def test_every_option_of_several_processes_has_arrived_in_a_run(runs):
    """As the runs have written it themselves, so that an option that nobody gives, or that gets lost, is seen."""
    trees = [OmegaConf.to_container(OmegaConf.load(path)) for path in sorted(runs.folder.glob("*/config.yaml"))]
    assert len(trees) == len(runs.records)
    missing = []
    options = [option for option in dataclasses.fields(ParallelConfig) if option.name != "layout"]  # test_auto_parallel
    for option in options:
        given = [tree["parallel"][option.name] for tree in trees]
        default = option.default_factory() if option.default is dataclasses.MISSING else option.default
        wanted = option.metadata.get("choices", ())
        missing += [f"{option.name} {choice}" for choice in wanted if choice not in given]
        missing += [] if any(value != default for value in given) else [option.name]
    assert missing == []
    engine = [tuple(tree["engine"][name] for name in ("activation_checkpointing", "compile")) for tree in trees]
    assert {("full", "auto"), ("selective", "auto"), ("none", "block")} < set(engine)
