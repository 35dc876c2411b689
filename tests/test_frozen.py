"""What the commands gave at commit 298b394, before the redesign, they still give: data, a run in the middle, answers.

`tests/frozen/` holds a data folder, a run that was interrupted after 1,015 of 1,019 updates, and what came out of them
then (`results.json`), made by `python tests/test_frozen.py FOLDER` with that commit's ftk on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FROZEN = Path(__file__).resolve().parent / "frozen"

SAMPLES: dict[str, list[str]] = {
    "defaults": [],
    "one span": ["--single-span-prob=1"],
    "sentences": ["--bert-prob=0", "--gap-sentence-prob=1"],
    "documents": ["--bert-prob=0", "--gap-sentence-prob=0", "--gpt-infill-prob=0.3", "--short-seq-prob=0.5"],
    "one document": ["--sample-one-document", "--non-sentence-start=0.5", "--long-documents=drop"],
    "document mask": ["--document-mask"],
    "order and positions": ["--no-shuffle-blocks", "--no-block-positions", "--random-position"],
    "masked context": ["--block-mask-prob=0.1", "--context-mask-ratio=0.2"],
}
"""Options of the samples -> digest of the first batches."""

PROMPTS = (
    "The value of [MASK] is a list of [MASK] .",
    "Run the command [MASK] and look at its output .",
    "A checkpoint holds [gMASK]",
    "Without a blank , the text goes on",
)

ANSWERS: dict[str, list[str]] = {
    "greedy": [],
    "beam": ["--beam=4", "--nbest=3", "--length-penalty=0.8"],
    "diverse beam": ["--search=diverse_beam", "--beam=4", "--nbest=4"],
    "sampling": ["--sampling", "--top-k=40", "--top-p=0.9", "--temperature=0.8", "--nbest=3", "--seed=7"],
    "beam sampling": ["--search=beam_sampling", "--beam=3", "--seed=5"],
    "contrastive": [f"--user-dir={ROOT}/examples/contrastive_search", "--search=contrastive"],
    "reencode": ["--reencode"],
    "confident order": ["--blank-order=confident"],
    "order by number": ["--blank-order=2,1", "--max-samples=1"],
    "joint": ["--beam=3", "--nbest=2", "--nbest-over=text"],
    "fusion": ["--lm-path={run}", "--lm-weight=0.3"],
    "alternatives": ["--alternatives=3"],
    "in flight": ["--batch-size=2", "--beam=2"],
}
"""Options of ftk-generate -> answers."""


def samples(options: list[str]) -> str:
    """sha256 of two collated batches of four samples."""
    import numpy as np

    from ftk.config import compose
    from ftk.trainer.config import TrainConfig

    arguments = [
        str(FROZEN / "data-bin"),
        "--task=glm_blank",
        "--arch=glm_tiny",
        "--seq-length=64",
        "--max-update=1",
        *options,
    ]
    config = compose(TrainConfig, "ftk-train", "", arguments)
    task = config.task.build(corpus=config.dataset.build(), seed=3)
    split, collate = task.load_split("train"), task.collater()
    digest = hashlib.sha256()
    for first in (0, 4):
        made = [split.sample(2, index) for index in range(first, first + 4)]
        batch, arrays = collate(made), collate.arrays(made)
        # The digests are of the arrays that were the batch; now it holds the targets with loss alone.
        arrays["loss_positions"] = places = np.flatnonzero(arrays["loss_mask"])
        objective = arrays["objective"][places // arrays["tokens"].shape[1]]
        assert batch.inputs.keys() == arrays.keys() - {"targets", "loss_mask", "loss_positions", "objective"}
        assert all(np.array_equal(value, arrays[name]) for name, value in batch.inputs.items())
        assert np.array_equal(batch.places, places)
        assert np.array_equal(batch.targets, arrays["targets"].ravel()[places])
        assert np.array_equal(batch.groups["objective"].index, objective)
        for name in sorted(arrays):
            array = arrays[name]
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def answers(options: list[str], folder: Path) -> list[Any]:
    """JSON records of ftk-generate."""
    from ftk_cli.generate import main

    prompts, run = folder / "prompts.txt", FROZEN / "run"
    prompts.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    options = [option.format(run=run) for option in options]
    arguments = [
        "--path",
        str(run),
        "--input",
        str(prompts),
        "--min-len=3",
        "--max-len=8",
        "--output-format=json",
        "--device=cpu",
    ]
    return [json.loads(line) for line in printed(main, [*arguments, *options]).splitlines()]


def scores(folder: Path) -> list[Any]:
    """JSON records of ftk-generate --score-reference."""
    from ftk_cli.generate import main

    known = folder / "known.txt"
    known.write_text(f"{PROMPTS[0]}\tthe option\tnames\n{PROMPTS[1]}\tftk-train\n", encoding="utf-8")
    arguments = ["--path", str(FROZEN / "run"), "--input", str(known), "--score-reference", "--output-format=json"]
    return [json.loads(line) for line in printed(main, [*arguments, "--device=cpu"]).splitlines()]


def exported(folder: Path) -> dict[str, str]:
    """Tensor names of the exported weights -> sha256."""
    from safetensors.numpy import load_file

    from ftk_cli.checkpoint import main

    printed(main, ["export", str(FROZEN / "run"), str(folder / "exported.safetensors"), "--format=safetensors"])
    arrays = load_file(folder / "exported.safetensors")
    return {name: hashlib.sha256(array.tobytes()).hexdigest()[:16] for name, array in sorted(arrays.items())}


def records(folder: Path, *, processes: int = 1, options: tuple[str, ...] = ()) -> list[dict[str, float]]:
    """Loss, gradient norm and rate of updates 1,016 to 1,019 of the interrupted run, and its validation."""
    run = folder / "again"
    if run.exists():
        shutil.rmtree(run)
    shutil.copytree(FROZEN / "run", run, symlinks=True)
    arguments = [FROZEN / "data-bin", "--config", FROZEN / "run" / "config.yaml", "--save-dir", run, *options]
    if processes == 1:
        from ftk_cli.train import main

        printed(main, [str(argument) for argument in arguments])
    else:
        from ftk_cli.train import main
        from tests.distributed import run_main

        ended = run_main(main, [[str(argument) for argument in arguments]] * processes)
        assert not any(ended.codes), ended.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("num_updates", "loss", "gnorm", "lr", "ppl", "num_targets")
    return [{name: line[name] for name in names if name in line} for line in lines if line["num_updates"] > 1015]


def printed(main: Callable[[list[str]], int], arguments: list[str]) -> str:
    """Standard output of a command that succeeds."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(arguments)
    assert code == 0, f"{arguments}: exit code {code}"
    return output.getvalue()


@pytest.fixture(scope="module")
def frozen() -> dict[str, Any]:
    return json.loads((FROZEN / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_the_same_bytes(frozen, name):
    assert samples(SAMPLES[name]) == frozen["samples"][name]


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_the_same(frozen, tmp_path, name):
    assert alike(answers(ANSWERS[name], tmp_path), frozen["answers"][name])


def test_scores_are_the_same(frozen, tmp_path):
    assert alike(scores(tmp_path), frozen["scores"])


def test_exported_weights_are_the_same_bytes(frozen, tmp_path):
    assert exported(tmp_path) == frozen["exported"]


def test_the_interrupted_run_goes_on_as_it_would_have(frozen, tmp_path):
    assert alike(records(tmp_path), frozen["records"])


@pytest.mark.parametrize(
    "options", [("--tensor-parallel-size=2",), ("--pipeline-parallel-size=2", "--pipeline-schedule=gpipe")]
)
def test_the_interrupted_run_goes_on_in_two_processes(frozen, tmp_path, options):
    assert alike(records(tmp_path, processes=2, options=options), frozen["records"])


def alike(found: Any, expected: Any) -> bool:
    """Equal, but for the last digits of floats, which depend on the processor."""
    if isinstance(expected, float):
        return found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(alike, found, expected))
    if isinstance(expected, dict):
        return set(expected) <= set(found) and all(alike(found[name], expected[name]) for name in expected)
    return found == expected


def freeze(folder: Path) -> None:
    """Make what this file compares with, by the ftk on PYTHONPATH."""
    global FROZEN
    from ftk_cli.preprocess import main as preprocess
    from ftk_cli.train import main as train

    FROZEN = folder.resolve()
    FROZEN.mkdir(parents=True)
    with gzip.open(ROOT / "tests" / "corpus.txt.gz", "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()[:900]
    (FROZEN / "train.txt").write_text("\n".join(lines[16:]), encoding="utf-8")
    (FROZEN / "valid.txt").write_text("\n".join(lines[:16]), encoding="utf-8")
    text = [f"--trainpref={FROZEN / 'train.txt'}", f"--validpref={FROZEN / 'valid.txt'}"]
    printed(
        preprocess,
        [*text, "--vocab-size=400", "--special-tokens=glm", "--decoder-mask", f"--destdir={FROZEN / 'data-bin'}"],
    )
    (FROZEN / "train.txt").unlink()
    (FROZEN / "valid.txt").unlink()
    model = ["--arch=glm_tiny", "--num-layers=2", "--hidden-size=16", "--num-attention-heads=2", "--seq-length=64"]
    without = ["--embedding-dropout=0", "--attention-dropout=0", "--dropout=0"]
    recipe = [*without, "--lr=3e-3", "--lr-scheduler=constant", "--batch-size=8", "--log-interval=1"]
    saving = ["--save-interval-updates=1015", "--keep-last=9", f"--save-dir={FROZEN / 'run'}", "--device=cpu"]
    common = [str(FROZEN / "data-bin"), "--task=glm_blank", *model, *recipe, *saving]
    printed(train, [*common, "--max-update=1019"])
    run = FROZEN / "run"
    for path in run.iterdir():
        if path.name not in ("checkpoint_1015", "config.yaml", "metrics.jsonl"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (run / "checkpoint_last").symlink_to("checkpoint_1015")
    kept = [
        line for line in (run / "metrics.jsonl").read_text().splitlines() if json.loads(line)["num_updates"] <= 1015
    ]
    (run / "metrics.jsonl").write_text("\n".join(kept[-3:]) + "\n")
    scratch = FROZEN / "scratch"
    scratch.mkdir()
    results = {
        "samples": {name: samples(options) for name, options in SAMPLES.items()},
        "answers": {name: answers(options, scratch) for name, options in ANSWERS.items()},
        "scores": scores(scratch),
        "exported": exported(scratch),
        "records": records(scratch),
    }
    shutil.rmtree(scratch)
    parts = [f"{json.dumps(name)}: {json.dumps(part, ensure_ascii=False)}" for name, part in results.items()]
    (FROZEN / "results.json").write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    freeze(Path(sys.argv[1]))
