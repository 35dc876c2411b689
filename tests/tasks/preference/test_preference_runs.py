"""Preferences by the commands: from models of four families to what is preferred, resumed, validated, refused."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch

import ftk
from ftk.checkpoint import load_model_tensors, read_config, resolve_model
from ftk.models import build_model
from ftk_cli import data, generate, train, validate
from tests.byte_tokenizer import CHATML, MARKS, byte_tokenizer
from tests.distributed import run_main
from tests.records import assert_same_tensors, assert_same_weights, losses_of, records_of
from tests.small_run import WORDS, save_model, save_run
from tests.tiers import slow_but

PAD, ROWS = 256 + MARKS.index("<pad>"), len(MARKS) + 256
SHAPES = {
    "llama": ("llama_tiny", {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_kv_heads": 1}),
    "gpt2": ("gpt2", {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 128}),
    "t5": ("t5_tiny", {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "decoder_start_token": PAD}),
}
NAMES = ["glm", *SHAPES]
LORA = ["--adapter", "lora"]


@pytest.fixture(scope="module")
def starts(tmp_path_factory, made_place) -> Path:
    """Untrained models: a GLM, and three whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("starts")
    save_run(folder / "glm", made_place / "data-bin", num_layers=1, hidden_size=32)
    byte_tokenizer(folder / "files", "<|im_end|>", CHATML).save(folder / "tokenizer")
    for name, (arch, shape) in SHAPES.items():
        torch.manual_seed(1)
        save_model(folder / name, build_model(arch, vocab_size=ROWS, **shape), folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Questions of two words; the first of them is preferred."""
    folder = tmp_path_factory.mktemp("pairs")
    draw = torch.Generator().manual_seed(1)
    for split, count in (("train", 16), ("valid", 8)):
        words = [[WORDS[int(n)] for n in torch.randperm(len(WORDS), generator=draw)[:2]] for _ in range(count)]
        rows = [{"prompt": f"{one} {two}", "chosen": f"{one} .", "rejected": f"of {two}"} for one, two in words]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


USUAL = ["--seq-length", 72, "--target-length", 24, "--batch-size", 4, "--lr", 0.003, "--lr-scheduler", "constant"]
USUAL += ["--template", "plain", "--validate-interval", 0, "--log-interval", 1, "--device", "cpu"]


def learn(here, rows: Path, start: Path, run: Path, *flags: object, code: int = 0) -> str:
    """A run from a model; later flags go before the usual ones. Gives what it says."""
    task = ["--task", "preference", "--finetune-from", start, *USUAL, "--save-dir", run]
    return here(train.main, rows, *task, *flags, code=code)[2]


@pytest.mark.parametrize("name", slow_but(["llama"], NAMES))
def test_a_model_learns_to_prefer_and_answers_afterwards(starts, pairs, tmp_path, here, name: str) -> None:
    run = tmp_path / "run"
    learn(here, pairs, starts / name, run, "--max-update", 24, "--validate-interval", 1, "--best-metric", "accuracy")
    first, last = records_of(run, "train")[0], records_of(run, "valid")[-1]
    assert first["margin"] < 0.5
    assert last["accuracy"] == 1.0
    assert last["margin"] == pytest.approx(last["reward_chosen"] - last["reward_rejected"], abs=1e-4)
    assert last["margin"] > 1
    assert "ppl" not in last
    best = max(record["accuracy"] for record in records_of(run, "valid"))
    _, out, _ = here(validate.main, pairs, "--path", run, "--output-format", "json", code=0)
    assert json.loads(out)["accuracy"] == best
    generator = ftk.load_generator(run, device="cpu", max_len=8)
    row = json.loads((pairs / "valid.jsonl").read_text().splitlines()[0])
    better, worse = generator.score(row["prompt"], [row["chosen"], row["rejected"]])
    before = ftk.load_generator(starts / name, device="cpu", max_len=8)
    assert type(generator).__name__ == "TextAnswerer" != type(before).__name__
    assert sum(better.logprobs) > sum(worse.logprobs)
    _, out, _ = here(generate.main, pairs, "--path", run, "--max-len", 4, "--output-format", "json", code=0)
    answered = json.loads(out.splitlines()[0])
    assert (answered["source"], answered["answers"][0]["reference"]) == (row["prompt"], row["chosen"])


@pytest.mark.parametrize("flags", [LORA, []], ids=["lora", "full"])
def test_a_resumed_run_is_the_uninterrupted_one_and_keeps_its_reference(starts, pairs, tmp_path, here, flags) -> None:
    start, whole, parts = starts / "gpt2", tmp_path / "whole", tmp_path / "parts"
    flags = [*flags, "--dropout", 0.1]
    learn(here, pairs, start, whole, *flags, "--max-update", 5)
    learn(here, pairs, start, parts, *flags, "--max-update", 2)
    learn(here, pairs, start, parts, *flags, "--max-update", 5)
    assert_same_weights(parts / "checkpoint_last", whole / "checkpoint_last")
    assert read_config(whole)["criterion"]["reference"] == (None if "lora" in flags else str(resolve_model(start)))
    assert losses_of(whole)[-1] < losses_of(whole)[0]
    other = shutil.copytree(start, tmp_path / "other")  # a run that is continued knows what it is compared with
    learn(here, pairs, other, parts, *flags, "--max-update", 6)
    assert read_config(parts)["criterion"] == read_config(whole)["criterion"]


def test_a_reference_stays_what_it_was_when_its_run_goes_on_and_may_move(starts, pairs, tmp_path, here, caplog) -> None:
    base, run, moved = tmp_path / "base", tmp_path / "run", tmp_path / "moved"
    first = shutil.copytree(starts / "gpt2", base / "checkpoint_1")
    learn(here, pairs, base, run, "--max-update", 1)
    shutil.copytree(run / "checkpoint_1", base / "checkpoint_2")
    for number, given in enumerate(([], ["--reference", base]), 2):
        learn(here, pairs, base, run, "--max-update", number, *given)
        assert read_config(run)["criterion"]["reference"] == str(first)
    base.rename(moved)
    gone = f"--reference {first}: no such folder; give a checkpoint folder or a run's folder; if it was moved, give"
    assert gone in learn(here, pairs, moved, run, "--max-update", 4, code=2)
    assert gone in here(validate.main, pairs, "--path", run, code=2)[2]
    there = ["--reference", moved / "checkpoint_1"]
    here(validate.main, pairs, "--path", run, *there, code=0)
    with caplog.at_level(logging.INFO):
        learn(here, pairs, moved, run, "--max-update", 4, *there)
    assert f"changed since this checkpoint: criterion.reference {first} -> {there[1]}" in caplog.text


def test_an_adapter_that_is_continued_needs_no_start(starts, pairs, tmp_path, here) -> None:
    start, run = shutil.copytree(starts / "gpt2", tmp_path / "start"), tmp_path / "run"
    learn(here, pairs, start, run, *LORA, "--max-update", 1)
    start.rename(tmp_path / "gone")
    learn(here, pairs, start, run, *LORA, "--max-update", 2)
    assert read_config(run)["criterion"]["reference"] is None


def test_the_first_loss_is_that_of_a_model_beside_itself(starts, pairs, tmp_path, here) -> None:
    still = ["--dropout", 0.0, "--embedding-dropout", 0.0, "--attention-dropout", 0.0, "--max-update", 3]
    learned = {}
    for name, flags in (("full", []), ("lora", LORA), ("copy", [*LORA, "--reference", starts / "gpt2"])):
        learn(here, pairs, starts / "gpt2", tmp_path / name, *still, *flags)
        learned[name] = losses_of(tmp_path / name)
        assert learned[name][0] == pytest.approx(math.log(2), abs=1e-6)
    assert learned["lora"] == pytest.approx(learned["copy"], abs=1e-6)
    assert learned["lora"][-1] < math.log(2) - 1e-3


# In bf16 attention has another kernel where there are no gradients.
@pytest.mark.parametrize(("precision", "near"), [("bf16", 1e-6), ("fp32", 1e-4)])
def test_a_reference_is_rounded_as_the_trained_model_is(starts, pairs, tmp_path, here, precision, near) -> None:
    still = ["--dropout", 0, "--embedding-dropout", 0, "--attention-dropout", 0, "--max-update", 1]
    learn(here, pairs, starts / "gpt2", tmp_path / "run", *still, "--weights", "bf16", "--precision", precision)
    assert losses_of(tmp_path / "run") == pytest.approx([math.log(2)], abs=near)


def test_an_adapter_that_learned_to_answer_goes_on_beside_what_it_was(starts, pairs, tmp_path, here) -> None:
    """Its reference is the model with the adapter as it was; and the template is that of the run before."""
    talks, before, run = tmp_path / "talks", tmp_path / "before", tmp_path / "run"
    talks.mkdir()
    for split in ("train", "valid"):
        (talks / f"{split}.jsonl").write_text(json.dumps({"prompt": "a fox", "completion": "a"}) + "\n")
    sft = ["--task", "sft", "--finetune-from", starts / "gpt2", *USUAL, "--save-dir", before, "--max-update", 4]
    here(train.main, talks, *sft, "--lr", 0.05, "--template", "chatml", *LORA, code=0)
    given = ["--task", "preference", "--finetune-from", before, *USUAL, "--save-dir", run, "--max-update", 3]
    given = [one for one in given if one not in ("--template", "plain")]
    here(train.main, pairs, *given, "--dropout", 0.0, "--embedding-dropout", 0, "--attention-dropout", 0, code=0)
    config = read_config(run)
    assert (config["criterion"]["reference"], config["task"]["template"]) == (str(resolve_model(before)), "chatml")
    _, shown, _ = here(data.main, "show", pairs, "--task", "preference", "--path", before, "--split", "valid", code=0)
    assert "<|im_start|>" in shown
    assert config["adapter"]["_name"] == "lora"
    assert losses_of(run)[0] == pytest.approx(math.log(2), abs=1e-5)
    frozen = {name: tensor for name, tensor in load_model_tensors(run).items() if "lora" not in name}
    assert_same_tensors(frozen, {name: tensor for name, tensor in load_model_tensors(before).items() if name in frozen})


OWN = """
from dataclasses import dataclass
from ftk.config.options import option
from ftk.criterions.base import Criterion
from ftk.criterions.preference import Preference, PreferenceLossConfig
from ftk.registry import register_criterion

@dataclass(kw_only=True)
class OwnConfig:
    reference: str | None = option(None, "what the model is compared with")
    compares = True

@register_criterion("own", config=OwnConfig, task="preference")
class Own(Criterion):
    reference = None

    def __init__(self, config):
        self.inner = Preference(PreferenceLossConfig())

    def count(self, batch):
        return self.inner.count(batch)

    def loss(self, head, hidden, batch):
        return self.inner.loss(head, hidden, batch)

    def __call__(self, model, batch):
        self.inner.reference = self.reference
        return self.inner(model, batch)
"""


def test_a_criterion_of_a_plugin_has_a_reference(starts, pairs, tmp_path, here) -> None:
    (tmp_path / "own.py").write_text(OWN)
    given = ["--user-dir", tmp_path / "own.py", "--criterion", "own", "--dropout", 0, "--embedding-dropout", 0]
    learn(here, pairs, starts / "gpt2", tmp_path / "run", *given, "--attention-dropout", 0, "--max-update", 2)
    assert read_config(tmp_path / "run")["criterion"]["reference"] == str(resolve_model(starts / "gpt2"))
    assert losses_of(tmp_path / "run")[0] == pytest.approx(math.log(2), abs=1e-6)


SHARES = {"R2": [], "S2": ["--data-parallel-shard-size", 2]}


@pytest.mark.parametrize("flags", [LORA, []], ids=["lora", "full"])
@pytest.mark.parametrize("shares", slow_but(["S2"], SHARES))
def test_data_ranks_learn_what_one_process_learns(starts, pairs, tmp_path, here, shares: str, flags: list) -> None:
    still = [*flags, "--dropout", 0, "--embedding-dropout", 0, "--attention-dropout", 0, "--max-update", 4]
    learn(here, pairs, starts / "gpt2", tmp_path / "one", *still, "--update-freq", 2)
    words = [pairs, "--task", "preference", "--finetune-from", starts / "gpt2", *USUAL, *still, *SHARES[shares]]
    ended = run_main(train.main, [[*map(str, [*words, "--save-dir", tmp_path / "two"])]] * 2)
    assert ended.returncode == 0, ended.stderr
    one, two = (records_of(tmp_path / name, "train") for name in ("one", "two"))
    for name in ("loss", "accuracy", "margin", "reward_chosen", "gnorm"):
        assert [record[name] for record in two] == pytest.approx([record[name] for record in one], abs=1e-4), name


REFUSED = [
    (["--preference-loss", "dpo"], "--preference-loss is 'dpo'; it must be one of sigmoid, ipo, hinge, simpo"),
    (["--simpo-margin", 1], "--simpo-margin"),
    (["--preference-loss", "simpo", "--reference", "gpt2"], "--reference"),
    (["--label-smoothing", 0.6], "--label-smoothing"),
    (["--pack"], "--pack"),
    (["--reference", "nowhere"], "nowhere: no such folder"),
    (["--reference", "{starts}/glm"], "--reference {starts}/glm has another tokenizer"),
    (["--teacher", "{starts}/gpt2"], "runs more than one pass, which --teacher does not support"),
    ([*LORA, "--train-also", "final_norm"], "--train-also changes weights of the model that is the reference"),
    (["--adapter", "p_tuning"], "has no places for the prompt tokens of --adapter p_tuning"),
    (["--criterion", "choice_cross_entropy"], "--criterion choice_cross_entropy is for --task cloze, not"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_what_does_not_fit_is_said_in_a_line(starts, pairs, tmp_path, here, flags, message) -> None:
    flags = [str(flag).format(starts=starts) for flag in flags]
    error = learn(here, pairs, starts / "gpt2", tmp_path / "run", "--max-update", 1, *flags, code=2)
    assert message.format(starts=starts) in error
    assert len(error.strip().splitlines()) <= 3
    assert not (tmp_path / "run").exists()


def test_without_a_start_there_is_no_reference_but_simpo_needs_none(starts, pairs, tmp_path, here) -> None:
    new = ["--arch", "gpt2_tiny", "--tokenizer-folder", starts / "llama", "--task", "preference", *USUAL]
    new += ["--max-update", 1, "--save-dir", tmp_path / "run"]
    _, _, error = here(train.main, pairs, *new, code=2)
    assert "--criterion preference compares the model with a reference; name the one that both start from" in error
    here(train.main, pairs, *new, "--preference-loss", "simpo", code=0)
    _, _, error = here(train.main, pairs, *new, "--finetune-from", starts / "llama", code=2)
    assert "criterion.preference_loss simpo -> sigmoid" in error


@pytest.mark.parametrize("size", ["tensor", "pipeline"])
def test_processes_that_share_a_model_are_refused(starts, pairs, tmp_path, here, size: str, monkeypatch) -> None:
    flags = [f"--{size}-parallel-size", 2, "--dry-run", "--max-update", 1]
    for given in ([], LORA):
        error = learn(here, pairs, starts / "gpt2", tmp_path / "run", *flags, *given, code=2)
        assert "--criterion preference needs the whole reference on each process" in error


def test_a_dry_run_counts_both_answers_and_says_what_it_leaves_out(starts, pairs, tmp_path, here) -> None:
    given = [pairs, "--task", "preference", "--finetune-from", starts / "gpt2", *USUAL, "--max-update", 1, "--dry-run"]
    _, out, _ = here(train.main, *given, code=0)
    assert "optimizer state; without the reference)" in out
    _, out, _ = here(train.main, *given, *LORA, code=0)
    assert "without the reference" not in out
