"""Runs of `ftk-train` that go on from checkpoints of other arrangements, and from original ones in several parts."""

from __future__ import annotations

import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ftk.checkpoint import load_model_tensors, read_trainer_state
from ftk.checkpoint.index import read_index
from ftk.checkpoint.reading import read_tensors
from ftk.hub import load_tokenizer
from tests.records import records_of
from tests.tiers import slow_but, wants_slow
from tests.trainer.parallel_jobs import run_records, samples_per_epoch

from .test_convert import HEADS, convert_from_original, cut_as_megatron_does, original_state, write_original
from .test_convert_optimizer import adam_of

TOLERANCE = 1e-5
FLAGS = (
    "--arch glm_tiny --device cpu --num-layers 2 --max-positions 64 --seq-length 48 --dropout 0 --attention-dropout 0 "
    "--embedding-dropout 0 --lr 1e-3 --lr-scheduler inverse_sqrt --warmup-updates 2 --log-interval 1 --log-format json "
    "--max-valid-samples 8"
)
ONE = "--update-freq 2"
T2 = f"{ONE} --tensor-parallel-size 2"
P2 = f"{ONE} --pipeline-parallel-size 2"
S2 = "--data-parallel-shard-size 2"
LAST = {"P2": (2, P2), "T2 x P2": (4, f"{T2} --pipeline-parallel-size 2")}

TAKE = {
    "restored": "--batch-size 8 --max-update 3 --restore-from",
    "finetuned": "--batch-size 8 --max-update 3 --finetune-from",
}


@pytest.fixture(scope="module")
def original(short_data_bin, tmp_path_factory) -> Path:
    """An original checkpoint in four parts, with Adam's moments, as an ftk checkpoint: the golden weights, which have
    128 tokens, again and again, until the vocabulary of the data is full."""
    folder = tmp_path_factory.mktemp("original")
    state = original_state()
    rows = load_tokenizer(short_data_bin).padded_vocab_size(128)
    words = state["word_embeddings.weight"]
    state["word_embeddings.weight"] = words.repeat(-(-rows // len(words)), 1)[:rows].clone()
    moments = {
        "exp_avg": {name: 0.01 * value for name, value in state.items()},
        "exp_avg_sq": {name: value.square() + 1e-3 for name, value in state.items()},
    }
    cut = {kind: cut_as_megatron_does(tensors, 4) for kind, tensors in moments.items()}
    parts = [
        {"module": part, "iteration": 7, "optimizer": adam_of(part, {kind: cut[kind][rank] for kind in cut}, 12)}
        for rank, part in enumerate(cut_as_megatron_does(state, 4))
    ]
    assert len(parts) == 4
    return convert_from_original(write_original(folder / "theirs", parts), folder / "ours", num_attention_heads=HEADS)


@pytest.fixture(scope="module")
def runs(short_data_bin, original, tmp_path_factory, command, request) -> dict[str, Any]:
    """The folder of the runs; all runs of a kind in one start of their processes."""
    folder = tmp_path_factory.mktemp("runs")

    def start(size: int, runs: list[tuple[str, str]]) -> None:
        run_records(short_data_bin, folder, [(name, size, f"{FLAGS} {flags}") for name, flags in runs])

    samples = samples_per_epoch(command, short_data_bin, *shlex.split(FLAGS), "--max-update", "8")
    batch_size = math.ceil(samples / 10)  # an epoch is five updates of two batches
    chain = f"--ema-decay 0.9 --batch-size {batch_size} --max-update"

    def taken(name: str, flags: str) -> list[tuple[str, str]]:
        return [(f"{kind} {name}", f"{flags} {how} {original}") for kind, how in TAKE.items()]

    start(2, [("chain", f"{T2} {chain} 2"), *taken("T2", T2), *taken("P2", P2)])
    start(1, [("undisturbed", f"{ONE} {chain} 8"), ("chain", f"{ONE} {chain} 4"), *taken("one", ONE)])
    start(2, [("chain", f"{S2} {chain} 6")])
    for name, (size, last) in LAST.items() if wants_slow(request) else [("P2", LAST["P2"])]:
        shutil.copytree(folder / "chain", folder / f"chain to {name}", symlinks=True)
        start(size, [(f"chain to {name}", f"{last} {chain} 8")])
    return {"folder": folder}


def assert_same_records(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    for several, one in zip(found, expected, strict=True):
        for figure in ("num_updates", "epoch", "loss", "gnorm", "lr", "ema_loss"):
            if figure in one:
                assert math.isclose(several[figure], one[figure], rel_tol=TOLERANCE), (figure, several, one)


@pytest.mark.parametrize("last", slow_but(["P2"], LAST))
def test_a_run_goes_on_in_every_arrangement_as_if_it_had_never_changed(runs, last):
    """T2, one process, S2, and the last one: optimizer, moving average, schedule and place in the data come along."""
    chain, undisturbed = runs["folder"] / f"chain to {last}", runs["folder"] / "undisturbed"
    expected = records_of(undisturbed, "train")
    assert [record["num_updates"] for record in expected] == list(range(1, 9))
    assert {record["epoch"] for record in expected} >= {1, 2}
    assert_same_records(records_of(chain, "train"), expected)
    assert_same_records(records_of(chain, "valid")[-1:], records_of(undisturbed, "valid")[-1:])
    ends = [folder / "checkpoint_8" for folder in (chain, undisturbed)]
    assert read_trainer_state(ends[0])["iterator"] == read_trainer_state(ends[1])["iterator"]
    for ema in (False, True):
        tensors = [load_model_tensors(end, ema=ema) for end in ends]
        assert_close(*tensors)
    moments = [{n: torch.empty(t.shape) for n, t in read_index(end / "optimizer").tensors.items()} for end in ends]
    for end, targets in zip(ends, moments, strict=True):
        read_tensors(end / "optimizer", targets)
    assert_close(*moments)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert len(expected) > 10
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-3 * tensor.abs().max(), name


@pytest.mark.parametrize("kind", TAKE)
@pytest.mark.parametrize("name", ["T2", "P2"])
def test_an_original_checkpoint_in_four_parts_is_taken_into_any_arrangement(runs, kind, name):
    expected = records_of(runs["folder"] / f"{kind} one", "train")
    assert_same_records(records_of(runs["folder"] / f"{kind} {name}", "train"), expected)


def test_the_original_gives_weights_and_moments(runs):
    own, *others = (
        records_of(runs["folder"] / name, "train") for name in ("undisturbed", "restored one", "finetuned one")
    )
    restored, finetuned = others
    assert restored[0]["loss"] == finetuned[0]["loss"] != pytest.approx(own[0]["loss"], rel=1e-3)
    assert restored[2]["loss"] != pytest.approx(finetuned[2]["loss"], rel=1e-4)
