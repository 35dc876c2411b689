"""The benchmark of generation compares what it says: the original's way gives ftk's tokens, and all ways run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftk.tasks.glm_blank import BlankGenerator
from tests.generation.slow import SPECIAL, small_model

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "benchmark"))

from original_generation import original_fill  # noqa: E402

TEXT = "the quick brown fox jumps over the lazy dog and runs far away from it before the night falls down number {}"


@pytest.mark.parametrize("seed", range(4))
def test_the_originals_way_gives_the_same_tokens(seed):
    model, context = small_model(seed=seed), [7, 8, 9, 3, 10, 11]
    ((answer,),) = BlankGenerator(model, SPECIAL, max_len=8, min_len=8).fill_ids([context])
    assert original_fill(model, context, SPECIAL, 8) == answer.tokens


@pytest.mark.slow
def test_a_quick_run_prints_a_table_and_writes_figures(tmp_path):
    words = sorted(set(TEXT.split()) - {"{}"})
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(10)), *words]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab), encoding="utf-8")
    (tmp_path / "text.txt").write_text("\n".join(TEXT.format(number % 10) for number in range(10)), encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts" / "benchmark" / "generate.py"), "--quick", "--num-lines", "8"]
    command += ["--text", str(tmp_path / "text.txt"), "--vocab", str(tmp_path / "vocab.txt")]
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json"), "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "out.json").read_text())
    assert {row["way"] for row in figures["steps"]["ways"]} >= {"original fp32", "ftk fp32", "ftk int8, beam 4"}
    assert all(row["same_tokens"] for row in figures["steps"]["ways"] if row["exact"])
    assert figures["lines"]["same_tokens"]
    assert "in flight is" in result.stdout


@pytest.mark.slow
def test_a_quick_run_of_prefix_caching(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "benchmark" / "prefix_caching.py"), "--quick"]
    result = subprocess.run([*command, "--json", str(tmp_path / "out.json")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "first token of the last turn" in result.stdout
    assert len(json.loads((tmp_path / "out.json").read_text())) == 6
