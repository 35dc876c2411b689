"""Runs with LayerDrop and stochastic depth: on several ranks, stopped and continued."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.records import assert_same_weights, losses_of
from tests.tiers import slow_but, wants_slow
from tests.trainer.parallel_jobs import run_records

FLAGS = (
    "--device cpu --arch gpt2_tiny --task causal_lm --num-layers 4 --hidden-size 32 --num-attention-heads 2 "
    "--max-positions 64 --seq-length 32 --dropout 0 --attention-dropout 0 --embedding-dropout 0 --lr 1e-3 "
    "--lr-scheduler constant --log-interval 1 --log-format json --batch-size 4 --max-valid-samples 8 "
    "--make-vocab-size-divisible-by 8 --layer-drop 0.3 --stochastic-depth 0.4"
)
TWO_RANKS = {
    "T2": "--update-freq 2 --tensor-parallel-size 2",
    "T2_SP": "--update-freq 2 --tensor-parallel-size 2 --sequence-parallel --activation-checkpointing full",
    "P2": "--update-freq 2 --pipeline-parallel-size 2 --activation-checkpointing selective",
    "DDP": "",
    "FSDP2": "--data-parallel-shard-size 2 --activation-checkpointing full",
}

QUICK = ("T2", "T2_lora")
LORA = "--update-freq 2 --max-update 2 --adapter lora --finetune-from"


@pytest.fixture(scope="module")
def runs(data_bin, tmp_path_factory, request) -> Path:
    folder = tmp_path_factory.mktemp("runs")

    runs = [(name, 2, f"{TWO_RANKS[name]} --max-update 2") for name in (TWO_RANKS if wants_slow(request) else ["T2"])]
    runs += [(name, 1, f"--update-freq 2 --max-update {n}") for name, n in (("one", 3), ("stopped", 1), ("stopped", 3))]
    runs += [("lora", 1, f"{LORA} {folder}/one"), ("T2_lora", 2, f"{LORA} {folder}/one --tensor-parallel-size 2")]
    run_records(data_bin, folder, [(name, size, f"{FLAGS} {flags}") for name, size, flags in runs])
    return folder


@pytest.mark.parametrize("layout", slow_but(QUICK, ["T2", "T2_SP", "T2_lora"]))
def test_tensor_parallel_ranks_drop_what_one_process_drops(runs, layout) -> None:
    found, expected = losses_of(runs / layout), losses_of(runs / ("lora" if layout == "T2_lora" else "one"))[:2]
    assert all(math.isclose(one, other, rel_tol=1e-6) for one, other in zip(found, expected, strict=True))


@pytest.mark.slow
def test_shards_and_copies_of_ranks_that_drop_on_their_own_learn_alike(runs) -> None:
    found, expected = losses_of(runs / "FSDP2"), losses_of(runs / "DDP")
    assert len(found) == len(losses_of(runs / "P2")) == 2
    assert all(math.isclose(one, other, rel_tol=1e-6) for one, other in zip(found, expected, strict=True))


def test_a_stopped_run_goes_on_bit_for_bit(runs) -> None:
    assert_same_weights(runs / "stopped" / "checkpoint_3", runs / "one" / "checkpoint_3")
