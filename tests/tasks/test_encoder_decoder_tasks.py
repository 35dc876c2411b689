"""The tasks of encoder-decoders through the command line: they learn, resume bit for bit, and say what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

import ftk
from ftk.checkpoint import read_config
from ftk.errors import UserError
from ftk.tasks.contract import _check_sample
from ftk.tasks.restore import restore_task
from tests.records import assert_same_weights, records_of
from tests.tiers import slow_but

TASKS = ("span_corruption", "denoising", "translation")
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "red", "green", "blue")
SHAPE = {"num-layers": 1, "hidden-size": 32, "num-attention-heads": 2, "head-dim": 16, "ffn-hidden-size": 64}
MODEL = ["--arch", "t5_tiny", *(str(part) for name, size in SHAPE.items() for part in (f"--{name}", size))]


@pytest.fixture(scope="module")
def data(tmp_path_factory, command) -> Path:
    """`texts`: documents, `pairs`: sentences and the same backwards; 16 of each are the split valid."""
    folder = tmp_path_factory.mktemp("data")
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(len(WORDS), (6,), generator=draw).tolist() for _ in range(320)]
    lines = [[WORDS[number] for number in row] for row in rows]
    for split, some in (("valid", lines[:16]), ("train", lines[16:])):
        texts = {"en": [" ".join(line) for line in some], "de": [" ".join(reversed(line)) for line in some]}
        for language, written in texts.items():
            (folder / f"{split}.{language}").write_text("".join(f"{text} .\n" for text in written))
    made = ["--trainpref", folder / "train.en", "--validpref", folder / "valid.en", "--vocab-size", 280]
    assert command("ftk-preprocess", *made, "--destdir", folder / "texts").returncode == 0
    made = ["--trainpref", folder / "train", "--validpref", folder / "valid", "--source-lang", "en"]
    made += ["--target-lang", "de", "--tokenizer-path", folder / "texts" / "tokenizer"]
    done = command("ftk-preprocess", *made, "--destdir", folder / "pairs", code=0)
    assert "--arch t5_tiny --task translation" in done.stdout
    return folder


def train(command, data: Path, task: str, run: Path, *options: object) -> list[dict]:
    """The records of a run."""
    folder = data / ("pairs" if task == "translation" else "texts")
    given = ["--task", task, *MODEL, "--seq-length", 40, "--batch-size", 8, "--lr", 0.01, "--lr-scheduler", "constant"]
    given += ["--log-interval", 1, "--dropout", 0.1, "--label-smoothing", 0.1]
    command("ftk-train", folder, *given, "--save-dir", run, *options, code=0)
    return records_of(run)


@pytest.mark.parametrize("task", slow_but(["span_corruption"], TASKS))
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, command, data, task) -> None:
    whole = train(command, data, task, tmp_path / "whole", "--max-update", 8)
    losses = [record["loss"] for record in whole if "lr" in record]
    assert min(losses[-2:]) < 0.9 * losses[0]
    train(command, data, task, tmp_path / "parts", "--max-update", 3)
    train(command, data, task, tmp_path / "parts", "--max-update", 8, "--num-workers", 1)
    assert_same_weights(tmp_path / "parts" / "checkpoint_last", tmp_path / "whole" / "checkpoint_last")


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("translation", [], "document 0 is not a pair of texts; preprocess pairs with --source-lang and --target-lang"),
        ("span_corruption", ["--arch", "gpt2_tiny"], "does not take 'lengths'"),
        ("span_corruption", ["--noise-density", 1.5], "--noise-density is 1.5; it must be above 0 and below 1"),
        ("span_corruption", ["--seq-length", 4000], "gives 222 spans, but the tokenizer has 100 sentinels"),
        ("denoising", ["--rotate", -1], "--rotate is -1.0; it must be from 0 to 1"),
    ],
)
def test_what_does_not_fit_is_said_in_a_line(tmp_path, command, data, task, options, message) -> None:
    given = options if "--arch" in options else [*MODEL, *options]
    done = command(
        "ftk-train", data / "texts", "--task", task, *given, "--max-update", 1, "--save-dir", tmp_path / "run", code=2
    )
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        (
            {"decoder_tokens": [1, 2]},
            r"\['decoder_tokens'\] is int64 \[2\]; it must be as long as the targets, \[..., 3\]",
        ),
        ({"targets": [1] * 8, "decoder_tokens": [1] * 8, "loss_mask": [1] * 8}, "has 8 tokens, but .* is 7"),
    ],
)
def test_a_plugins_source_has_a_length_of_its_own(change, message) -> None:
    sample: dict = {name: np.ones(3, dtype=np.int64) for name in ("decoder_tokens", "targets")}
    sample |= {"tokens": np.ones(7, dtype=np.int64), "lengths": 7, "loss_mask": np.ones(3, dtype=bool)}
    sample |= {name: np.array(value, dtype=sample[name].dtype) for name, value in change.items()}
    if message is None:
        _check_sample("own", sample, 7)
        return
    with pytest.raises(UserError, match=message):
        _check_sample("own", sample, 7)


def test_answers_are_written_and_scored(tmp_path, command, data) -> None:
    """After some updates the model has learned to end where the sentence ends, with words in between."""
    train(command, data, "translation", tmp_path / "run", "--max-update", 8)
    ask = ["--path", tmp_path / "run", "--max-len", 12]
    done = command("ftk-generate", *ask, "--input", "-", input="one two three .\nred green blue .\n", code=0)
    assert len(done.stdout.splitlines()) >= 2
    given = ["--gen-subset", "valid", "--max-samples", 4, "--scoring", "token_f1", "--output-format", "fairseq"]
    done = command("ftk-generate", data / "pairs", *ask, *given, code=0)
    first = (data / "valid.en").read_text().splitlines()[0], (data / "valid.de").read_text().splitlines()[0]
    lines = done.stdout.splitlines()
    assert f"S-0\t{first[0]}" in lines
    assert any(line.startswith("T-0") and line.endswith(first[1]) for line in lines)
    assert "token_f1 = " in done.stdout + done.stderr


def test_a_prefix_is_read_in_generation_as_in_training(tmp_path, command) -> None:
    """Where spaces belong to the word behind them, "go: " and "the" are other tokens apart than together."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    pieces = [*sorted(ByteLevel.alphabet()), *map("".join, merges), "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in merges))
    for language in ("en", "de"):
        (tmp_path / f"text.{language}").write_text("the thing\n" * 8)
    made = ["--trainpref", tmp_path / "text", "--source-lang", "en", "--target-lang", "de"]
    made += ["--destdir", tmp_path / "bin"]
    command("ftk-preprocess", *made, "--tokenizer", "gpt2_bpe", "--tokenizer-path", tmp_path, code=0)
    given = ["--task", "translation", *MODEL, "--source-prefix", "go: ", "--seq-length", 16, "--valid-subset", "none"]
    run = tmp_path / "run"
    command("ftk-train", tmp_path / "bin", *given, "--batch-size", 4, "--max-update", 1, "--save-dir", run, code=0)
    task, _ = restore_task(run, str(tmp_path / "bin"))
    sample = task.load_split("train").sample(1, 0)
    generator = ftk.load_generator(run, device="cpu", max_len=4)
    assert generator._prompt_ids("the thing") == sample["tokens"].tolist()
    assert generator.encode_sample(sample).prompt == "the thing"


def test_the_model_is_told_what_the_decoder_starts_with(tmp_path, command, data) -> None:
    train(command, data, "translation", tmp_path / "run", "--max-update", 1)
    start = read_config(tmp_path / "run" / "checkpoint_last")["model"]["decoder_start_token"]
    options = ["--finetune-from", tmp_path / "run", "--decoder-start", "bos", "--save-dir", tmp_path / "other"]
    done = command("ftk-train", data / "pairs", "--task", "translation", *options, "--max-update", 1, code=2)
    assert f"starts with token {start}" in done.stderr or "has no bos token" in done.stderr
