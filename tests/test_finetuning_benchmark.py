"""The benchmark of fine-tuning: its commands work, a step that is done is not done again, and its table."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftk_cli.evaluate import main as evaluate
from ftk_cli.preprocess import main as preprocess
from ftk_cli.train import main as train

ROOT = Path(__file__).resolve().parents[1]
BENCHMARK = ROOT / "scripts" / "benchmark" / "finetuning.py"
sys.path.insert(0, str(BENCHMARK.parent))

from finetuning import (  # noqa: E402
    TASKS,
    Run,
    chosen_sentences,
    few_rows,
    harness_table,
    majority,
    rouge,
    table,
    write_few,
    write_sentences,
)


@pytest.fixture
def data(test_data, tmp_path) -> Path:
    """The folder DATA with a little of its text."""
    folder = tmp_path / "data"
    (folder / "english").mkdir(parents=True)
    for split in ("train", "valid"):
        with open(test_data / "english" / f"{split}.txt", encoding="utf-8") as lines:
            text = "".join(line for line, _ in zip(lines, range(200), strict=False))
        (folder / "english" / f"{split}.txt").write_text(text, encoding="utf-8")
    for name in ("superglue", "tokenizers"):
        (folder / name).symlink_to(test_data / name)
    return folder


@pytest.mark.slow
def test_a_row_is_trained_and_measured_once(data, tmp_path):
    command = [sys.executable, str(BENCHMARK), str(data), str(tmp_path / "out"), "--only", "copa", "sft-64"]
    command += ["--methods", "LoRA", "by-heart", "--seeds", "1", "2", "--quick"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for wanted in (True, False):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        commands = [line for line in done.stdout.splitlines() if line.startswith("ftk-")]
        assert len(commands) == (2 + 2 * 2 + 2 if wanted else 0)  # the base, COPA with two seeds, sft
        copa, sft = (line.split() for line in done.stdout.splitlines()[-2:])
        assert copa[:4] == ["copa", "LoRA", "accuracy", "2"]
        assert copa[-2] == "55.00"  # the share of the most frequent label
        assert sft[:5] == ["sft-64", "by-heart", "exact_match", "1", "0.00"]


def test_the_rows_that_are_learned_by_heart_need_their_own_data_alone(test_data):
    for name, task in TASKS.items():
        if task.methods == ("by-heart",):
            rows = few_rows(test_data, task.train.split()[0].removeprefix("few/"))
            assert len(rows) == int(name.rpartition("-")[2]), name
    assert few_rows(test_data, "cmrc")[0]["target"] == "踢爆"


def test_sentences_are_chosen_as_summaries(tmp_path):
    pytest.importorskip("rouge_score")
    folder = tmp_path / "seq2seq" / "scitldr_a"
    folder.mkdir(parents=True)
    sources = ["Foxes are old. We show that dogs run. It rains.", "We read long letters.", "One fox. A dog sat."]
    targets = ["Dogs run.", "We read letters.", "One red fox."]
    for split in ("train", "test"):
        for end, texts in (("source", sources), ("target", targets)):
            (folder / f"{split}.{end}").write_text("".join(f"{text}\n" for text in texts))
    write_sentences(tmp_path, tmp_path / "rows")
    rows = [json.loads(line) for line in (tmp_path / "rows" / "test.jsonl").read_text().splitlines()]
    assert [(row["choices"][row["label"]], len(row["choices"])) for row in rows] == [
        ("We show that dogs run.", 3),
        ("One fox.", 2),
    ]
    candidates = [[{"text": text} for text in row["choices"]] for row in rows]
    found = [{"candidates": texts, "chosen": number} for texts, number in zip(candidates, (0, 1), strict=True)]
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    chosen = ("Foxes are old.", "We read long letters.", "A dog sat.")
    assert chosen_sentences(tmp_path, tmp_path) == rouge(zip(chosen, targets, strict=True))


@pytest.mark.slow
def test_answers_in_chinese_are_learned_by_heart(test_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_few(test_data, tmp_path / "few" / "cmrc")
    with open(test_data / "chinese" / "valid.jsonl", encoding="utf-8") as lines:
        (tmp_path / "train.jsonl").write_text("".join(itertools.islice(lines, 50)), encoding="utf-8")
    vocabulary = f"--tokenizer sentencepiece --tokenizer-path {test_data}/tokenizers/cog-pretrain.model"
    assert preprocess(f"--trainpref train.jsonl --text-key text {vocabulary} --destdir bin".split()) == 0
    still = "--dropout 0 --attention-dropout 0 --embedding-dropout 0 --valid-subset none --device cpu"
    shape = "--arch glm_tiny --hidden-size 96 --num-attention-heads 4 --num-layers 2 --init-std 0.06 --seq-length 160"
    assert train(f"bin {shape} {still} --batch-size 2 --max-update 1 --save-dir base".split()) == 0
    task = TASKS["cmrc-24"]
    learned = "--seq-length 96 --lr 3e-3 --batch-size 8 --save-interval 0 --max-epoch 100"  # of 160
    assert train(f"{task.train} {still} {learned} --finetune-from base --save-dir run".split()) == 0
    assert evaluate(f"{task.evaluate} --path run --output results --device cpu".split()) == 0
    (found,) = json.loads((tmp_path / "results" / "results.json").read_text())["results"]
    assert (found["n"], found["metrics"]["cmrc_em"]["value"]) == (24, 100.0)


def test_a_step_of_another_command_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    run = Run(tmp_path / "data", tmp_path / "out", quick=False)
    record = tmp_path / "out" / "steps" / "made.json"
    record.write_text(json.dumps({"command": ["ftk-train", "x"], "seconds": 3.0}))
    assert run.step("made", "ftk-train x") == 3.0
    with pytest.raises(SystemExit, match="made by another command"):
        run.step("made", "ftk-train y")


def test_the_table_has_mean_and_deviation_over_seeds(tmp_path):
    for seed, accuracy in ((1, 60.0), (2, 70.0)):
        for folder in (tmp_path / "results" / f"boolq-full-{seed}", tmp_path / "steps"):
            folder.mkdir(parents=True, exist_ok=True)
        results = {"results": [{"metrics": {"accuracy": {"value": accuracy}}}]}
        (tmp_path / "results" / f"boolq-full-{seed}" / "results.json").write_text(json.dumps(results))
        (tmp_path / "steps" / f"boolq-full-{seed}.json").write_text(json.dumps({"seconds": 10.0 * seed}))
    labels = tmp_path / "superglue" / "BoolQ"
    labels.mkdir(parents=True)
    (labels / "val.jsonl").write_text('{"label": true}\n{"label": true}\n{"label": false}\n')
    assert majority(tmp_path, "superglue/BoolQ/val.jsonl") == {"accuracy": pytest.approx(200 / 3)}
    _, row = table(tmp_path, tmp_path, ["boolq"])
    assert row.split() == ["boolq", "full", "accuracy", "2", "65.00", "7.07", "66.67", "15"]


def test_the_three_programs_stand_side_by_side(tmp_path):
    metrics = {"lambada": {"perplexity": 9.5}, "perplexity": {"bits_per_byte": 2.125, "word_perplexity": 1853.25}}
    made = [
        {"evaluation": name, "metrics": {metric: {"value": value} for metric, value in own.items()}}
        for name, own in metrics.items()
    ]
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "results.json").write_text(json.dumps({"results": made}))
    for name, value in (("ftk_1", 3.0), ("ftk_2", 9.5), ("transformers_1", 9.25)):
        found = {
            "ftk_lambada": {"perplexity,none": value},
            "ftk_wikitext2": {"bits_per_byte,none": 2.0, "word_perplexity,none": 2122.5},
        }
        (tmp_path / f"harness-{name}.json").write_text(json.dumps({"results": found}))
    assert [line.split()[-3:] for line in harness_table(tmp_path)[1:]] == [
        ["9.5000", "2.1250", "1,853.2500"],
        ["9.5000", "2.0000", "2,122.5000"],
        ["9.2500", "2.0000", "2,122.5000"],
    ]
