"""The benchmark of the training step compares what it says: the original's computation, and ftk's own update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.golden_glm import read_arrays, read_config

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "glm_tiny"
sys.path.insert(0, str(ROOT / "scripts" / "benchmark"))

from original_way import OriginalGLM, OriginalWay  # noqa: E402
from step_ways import Way, all_ways, build_step, dense, make_batches, model_config  # noqa: E402


def golden_model():
    model = OriginalGLM(read_config())
    model.load_state_dict(read_arrays("weights.npz"))
    return model


def test_the_original_way_computes_the_logits_of_the_original():
    step = read_arrays("step0.npz")
    with torch.no_grad():
        logits = golden_model()(step["input_ids"], step["position_ids"], step["sep"])
    torch.testing.assert_close(logits, step["logits"], atol=1e-4, rtol=0)


def test_the_original_way_follows_twenty_updates_of_the_original():
    arrays = read_arrays("train.npz")
    names = {"tokens": "input_ids", "targets": "targets", "position_ids": "position_ids", "context_length": "sep"}
    way = OriginalWay(golden_model(), "fp32", lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1, clip_norm=1.0)
    losses = []
    for update in range(20):
        batch = {ours: arrays[theirs][update % 2] for ours, theirs in names.items()}
        losses.append(way.step({**batch, "loss_mask": arrays["loss_mask"][update % 2]}).item())
    assert losses == pytest.approx(arrays["losses"].tolist(), abs=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_original_way_in_lower_precision_stays_close(precision):
    config = model_config(
        {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1024}, 64, dropout=0.0
    )
    batches = make_batches(config, 2, 64, 4)
    losses = {}
    for kind in ("fp32", precision):
        step = build_step(Way("original", kind), config, torch.device("cpu"))
        losses[kind] = [step.step(batch).item() for batch in batches]
    assert losses[precision] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses[precision] != losses["fp32"]


def test_batches_have_the_usual_share_of_loss_and_the_asked_shape():
    config = model_config(
        {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 30592}, 512, dropout=0.0
    )
    batches = make_batches(config, 4, 256, 8)
    assert {tuple(batch.inputs["tokens"].shape) for batch in batches} == {(4, 256)}
    share = sum(len(batch.targets) for batch in batches) / sum(batch.num_tokens for batch in batches)
    assert 0.17 < share < 0.19
    for batch in batches:
        arrays = dense(batch)
        assert arrays["targets"][arrays["loss_mask"]].equal(batch.targets)


def test_every_combination_of_options_is_a_way():
    ways = all_ways(["fp32", "bf16"], ["off", "on"], attention=["sdpa", "flex"], compile=["none", "block"])
    names = [way.name for way in ways]
    assert names[:3] == ["original fp32", "original bf16", "original fp32 tf32"]
    assert len(names) == len(set(names)) == 3 + 3 * 4
    assert "ftk bf16, attention flex, compile block" in names


@pytest.mark.slow
def test_the_benchmark_runs_and_its_losses_agree(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "benchmark" / "train_step.py", "--quick", "--device", "cpu"]
    command += ["--precision", "fp32", "--checkpointing", "none", "full", "--json", tmp_path / "out.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [figures] = json.loads((tmp_path / "out.json").read_text())["sizes"]
    original, ours, checkpointed = figures["ways"]
    assert original["ratio_fp32"] == 1.0
    assert max(ours["loss_distance"], checkpointed["loss_distance"]) < 1e-4
    for row in (ours, checkpointed):
        assert row["tokens_per_second"] == pytest.approx(2 * 64 / row["seconds"])
        assert row["gflops"] == pytest.approx(figures["flops"] / row["seconds"] / 1e9)
        assert row["memory_mb"] > 0
        assert f"| {row['way']} |" in done.stdout


@pytest.mark.slow
def test_a_way_whose_losses_differ_is_reported(tmp_path):
    """Dropout in one way only would be such a mistake; here the tolerance is made impossible to keep."""
    code = (
        "import sys; sys.path.insert(0, 'scripts/benchmark'); import train_step; "
        "train_step.TOLERANCE = dict.fromkeys(train_step.TOLERANCE, 0.0); "
        "sys.argv = ['train_step.py', '--quick', '--device', 'cpu', '--precision', 'bf16']; "
        "sys.exit(train_step.main())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "FAILED ftk bf16: losses differ from original fp32's" in done.stdout
