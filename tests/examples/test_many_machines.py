"""The examples of preprocessing on many machines write what one machine does: Slurm (played), Ray, datatrove."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.processes import run_command

EXAMPLES = ROOT / "examples" / "many_machines"
SENTENCE = "the cat sat on a mat and saw one bird fly over two old trees near that house by seven hills"
WORDS = SENTENCE.split()

# Runs the tasks of an array one after the other, as Slurm would at the same time; a job behind others only after them.
SBATCH = """#!/bin/bash
for word in "$@"; do
  case $word in --array=*) array=${word#--array=};; --dependency=*) after=${word#--dependency=};; esac
done
script=${@: -1}
echo "${after:-none}" >> "$0.dependencies"
export SLURM_CPUS_PER_TASK=1
if [ -z "${array:-}" ]; then sh -c "$script" >&2; exit; fi
for task in $(seq "${array%-*}" "${array#*-}"); do SLURM_ARRAY_TASK_ID=$task sh -c "$script" >&2; done
echo "7;cluster"
"""

# A tokenizer's plugin that kills the worker of Ray under which the first shard runs, and that shard with it.
KILLS = """
import os, pathlib, signal
marker = pathlib.Path({marker!r})
try:
    marker.touch(exist_ok=False)
except FileExistsError:
    pass
else:
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(1)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A text of 1 MB (in several parts), and data-bin, what one machine makes of it."""
    folder = tmp_path_factory.mktemp("many machines")
    lines = (" ".join(WORDS[(start * step + step) % len(WORDS)] for step in range(20)) for start in range(9000))
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    small = "\n".join((folder / "text.txt").read_text(encoding="utf-8").splitlines()[:200])
    (folder / "small.txt").write_text(small, encoding="utf-8")
    run_command(
        *("ftk-preprocess", "--trainpref", folder / "small.txt", "--destdir", folder / "small-bin"),
        *("--vocab-size", 290, "--workers", 1),
        code=0,
    )
    run_command("ftk-preprocess", *flags(folder), "--workers", 1, "--destdir", folder / "data-bin", code=0)
    return folder


def flags(place: Path) -> list[str]:
    return ["--trainpref", str(place / "text.txt"), "--tokenizer-path", str(place / "small-bin" / "tokenizer")]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_slurm_runs_a_task_for_each_shard_and_then_merges(place, tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {
        "sbatch": SBATCH,
        "ftk-preprocess": f'#!/bin/bash\nexec "{sys.executable}" -m ftk_cli preprocess "$@"\n',
        "ftk-data": f'#!/bin/bash\nexec "{sys.executable}" -m ftk_cli data "$@"\n',
    }.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    out = tmp_path / "data bin"
    script = ["bash", str(EXAMPLES / "preprocess_slurm.sh")]
    done = subprocess.run(
        [*script, "3", str(out), *flags(place)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert contents(out) == contents(place / "data-bin")
    assert (commands / "sbatch.dependencies").read_text().split() == ["none", "afterok:7"]
    wrong = subprocess.run([*script, "3"], env=environment, capture_output=True, text=True, timeout=60)
    assert (wrong.returncode, "usage:" in wrong.stderr) == (2, True)


@pytest.mark.slow
def test_ray_does_the_shard_of_a_killed_worker_again(place, tmp_path):
    pytest.importorskip("ray", reason="needs ray")
    marker, plugin, out = tmp_path / "killed", tmp_path / "kills.py", tmp_path / "data-bin"
    script = [sys.executable, str(EXAMPLES / "preprocess_ray.py")]
    plugin.write_text(KILLS.format(marker=str(marker)))
    done = subprocess.run(
        [*script, "--shards", "3", "--destdir", str(out), *flags(place), "--user-dir", str(plugin)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEFAULT_NUM_CPUS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert marker.exists()
    assert "0 to come" in done.stdout
    assert contents(out) == contents(place / "data-bin")


@pytest.mark.slow
def test_a_datatrove_pipeline_ends_in_a_data_folder(place, tmp_path):
    pytest.importorskip("datatrove", reason="needs datatrove")
    texts = (place / "small.txt").read_text(encoding="utf-8").splitlines()
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        rows = [json.dumps({"text": text, "id": f"{number}-{i}"}) for i, text in enumerate(texts[number::3])]
        (tmp_path / "corpus" / f"{number}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    script = tmp_path / "pipeline.py"
    shutil.copy(EXAMPLES / "datatrove_step.py", tmp_path)
    script.write_text(
        f"""
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove_step import ToDataFolder

if __name__ == "__main__":
    step = ToDataFolder({str(tmp_path / "shards")!r}, tokenizer={str(place / "small-bin")!r})
    steps = [JsonlReader({str(tmp_path / "corpus")!r}), LambdaFilter(lambda document: "bird" in document.text), step]
    LocalPipelineExecutor(steps, tasks=3, workers=2, logging_dir={str(tmp_path / "logs")!r}).run()
"""
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folders = [tmp_path / "shards" / str(number) for number in (1, 2, 3)]
    run_command("ftk-data", "merge", "--shards", *folders, "--destdir", tmp_path / "data-bin", code=0)

    from ftk.data import IndexedDataset
    from ftk.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(tmp_path / "data-bin")
    found = [tokenizer.decode(row) for row in IndexedDataset(tmp_path / "data-bin" / "train")]
    assert found == [text for number in range(3) for text in texts[number::3] if "bird" in text]
    assert 0 < len(found) < len(texts)
