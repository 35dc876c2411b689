"""The main job by its commands, as a user runs them: preprocess, train, continue, validate, generate."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import pytest
import yaml

import ftk
from tests.processes import start_command, wait_until
from tests.records import losses_of, records_of
from tests.tiers import slow_but

TINY = ["--arch", "glm_tiny", "--seq-length", 64, "--batch-size", 4, "--lr", "2e-3", "--log-interval", 5]
TINY += ["--save-interval-updates", 5, "--validate-interval-updates", 5]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, data_bin, command) -> Path:
    """A run of ten updates with JSON logs."""
    out = tmp_path_factory.mktemp("run") / "run"
    done = command("ftk-train", data_bin, *TINY, "--max-update", 10, "--log-format", "json", "--save-dir", out, code=0)
    (out.parent / "stdout.jsonl").write_text(done.stdout)
    return out


def test_json_logs_have_numbers(run_folder):
    rows = [json.loads(line) for line in (run_folder.parent / "stdout.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["event"] == "train"]
    assert [row["num_updates"] for row in train] == [5, 10]
    for row in train:
        for name in ("loss", "lr", "gnorm", "tokens_per_second"):
            assert isinstance(row[name], float)
    assert {"loss_token", "loss_sentence", "loss_document"} <= {name for row in rows for name in row}


def test_a_repeated_run_from_its_config_is_equal(run_folder, tmp_path, command):
    again = tmp_path / "again"
    command("ftk-train", "--config", run_folder / "config.yaml", "--save-dir", again, code=0)
    first, second = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (run_folder, again))
    assert second["checkpoint"].pop("save_dir") == str(again)
    first["checkpoint"].pop("save_dir")
    assert first == second
    for event in ("train", "valid"):
        assert losses_of(again, event) == losses_of(run_folder, event) != []


def test_the_run_goes_on_where_it_stopped(run_folder, data_bin, tmp_path, command):
    import shutil

    shutil.copytree(run_folder, tmp_path / "run", symlinks=True)
    done = command("ftk-train", data_bin, *TINY, "--max-update", 12, "--save-dir", tmp_path / "run", code=0)
    assert "10 updates" in done.stderr
    assert (tmp_path / "run" / "checkpoint_12").is_dir()


@pytest.mark.parametrize(("layout", "arch"), [("plain", "glm_tiny"), ("with_end", "gpt2_tiny")])
def test_what_preprocess_names_next_works_and_ends(layout, arch, tmp_path, capsys):
    from ftk_cli.preprocess import main as preprocess
    from ftk_cli.train import main as train

    (tmp_path / "text.txt").write_text("".join(f"line {number} of a small text .\n" for number in range(400)))
    text = ["--trainpref", str(tmp_path / "text.txt"), "--tokenizer", "sentencepiece", "--vocab-size", "300"]
    assert preprocess([*text, "--special-tokens", layout, "--destdir", str(tmp_path / "my data")]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if " ftk-train " in line]
    words = shlex.split(line)
    assert words[:4] == ["ftk-train", str(tmp_path / "my data"), "--arch", arch]
    assert "--max-update" in words
    assert train([*words[1:], "--dry-run", "--device", "cpu"]) == 0


def test_validate_agrees_with_training(run_folder, data_bin, command):
    done = command(
        "ftk-validate", data_bin, "--path", run_folder / "checkpoint_10", "--unigram", "--output-format", "json", code=0
    )
    figures = json.loads(done.stdout)
    *_, last = records_of(run_folder, "valid")
    assert figures["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert 3.0 < figures["unigram_loss"] < 7.0
    assert last["unigram_loss"] == pytest.approx(figures["unigram_loss"], rel=1e-9)


def test_generate_prints_fairseqs_lines_and_json(run_folder, data_bin, command):
    samples = ("ftk-generate", data_bin, "--path", run_folder, "--max-samples", 2, "--output-format")
    text = command(*samples, "fairseq", "--gen-subset", "valid", code=0)
    assert {line.split("-")[0] for line in text.stdout.splitlines() if "\t" in line} >= {"S", "T", "H", "D", "P"}
    rows = command(*samples, "json")
    assert len([json.loads(line) for line in rows.stdout.splitlines()]) == 2


def test_prompts_by_standard_input_and_in_python_agree(run_folder, command):
    prompt = "Every part has one [MASK] of options and [MASK] flags."
    done = command(
        "ftk-generate", "--path", run_folder, "--input", "-", "--output-format", "json", input=prompt + "\n", code=0
    )
    result = ftk.load_generator(run_folder).fill([prompt])[0]
    told = json.loads(done.stdout.splitlines()[0])
    assert told["text"] == result.text
    assert [answer["tokens"] for answer in told["answers"]] == [answer.tokens for answer in result.answers]
    assert len(result.answers) == 2


def test_hydra_composes_the_same_run(data_bin, tmp_path, command):
    command(
        "ftk-hydra-train",
        "--config-name",
        "glm_tiny",
        f"dataset.data={data_bin}",
        "task.seq_length=64",
        "training.max_update=2",
        f"checkpoint.save_dir={tmp_path / 'run'}",
        f"hydra.run.dir={tmp_path}",
        cwd=tmp_path,
        code=0,
    )
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["task"]["seq_length"] == 64


def test_dry_run_says_what_would_be(data_bin, tmp_path, command):
    done = command(
        "ftk-train", data_bin, *TINY, "--max-update", 10, "--dry-run", "--save-dir", tmp_path / "run", code=0
    )
    assert not (tmp_path / "run").exists()
    for text in ("seq_length: 64", "parameters ", "tokens per update", "updates in total     10", "GiB"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("number", "exit_code"),
    slow_but([(signal.SIGTERM, 0)], [(signal.SIGINT, 1), (signal.SIGTERM, 0), (signal.SIGUSR1, 0)]),
)
def test_a_signal_finishes_the_update_saves_and_says_so(number, exit_code, data_bin, tmp_path):
    out = tmp_path / "run"
    arguments = (data_bin, *TINY, "--max-update", 100_000, "--save-dir", out)
    process = start_command("ftk-train", *arguments, errors=tmp_path / "errors")
    wait_until((out / "checkpoint_5").exists, process)
    os.kill(process.pid, number)
    process.join(300)
    errors = (tmp_path / "errors").read_text()
    assert process.exitcode == exit_code, errors  # preempted and saved is well ended
    assert number.name in errors
    assert "Traceback" not in errors
    assert not list(out.glob("*.tmp*"))
    assert ftk.load_model(out / "checkpoint_last") is not None


USER_ERRORS = [
    ("ftk-train /nowhere --arch glm_tiny --max-update 1", "no such data folder"),
    ("ftk-train DATA --arch glm_huge", "unknown architecture 'glm_huge'"),
    ("ftk-train DATA --arch glm_tiny --max-updat 5", "did you mean --max-update"),
    ("ftk-train DATA --arch glm_tiny", "give --max-update or --max-epoch"),
    ("ftk-train DATA --arch glm_tiny --max-update 1 --seq-length 1024", "512 positions"),
    ("ftk-train DATA/preprocess.json --arch glm_tiny --max-update 1", "holds no .idx file"),
    ("ftk-train RUN --arch glm_tiny --max-update 1", "it is a run or a model; give a folder written by ftk-preprocess"),
    ("ftk-train DATA/tokenizer --arch glm_tiny --max-update 1", "data-bin/tokenizer holds no .idx file; it is a token"),
    ("ftk-train DATA/train --arch glm_tiny --max-update 1", "of which this is a split (in training --train-subset tr"),
    ("ftk-train DATA DATA --arch glm_tiny --max-update 1", "to blend folders write DATA,"),
    (
        "ftk-train DATA --task seq2seq --finetune-from RUN --max-update 1 --save-dir OUT",
        "data-bin is a folder of tokens (.bin/.idx), and the task reads rows: give a folder with train.jsonl",
    ),
    ("ftk-train DATA --arch glm_tiny --max-update 1 --train-subset tain", "no split 'tain'"),
    (
        "ftk-train DATA --arch glm_tiny --max-update 1 --valid-subset vald",
        "valid (--valid-subset none trains without validation)\n",
    ),
    ("ftk-train DATA --arch glm_tiny --max-update 1 --device tpu", "device is 'tpu'"),
    ("ftk-train DATA --config DATA", "is a folder"),
    ("ftk-generate DATA --path /nowhere", "/nowhere"),
    ("ftk-generate --path RUN --input /nowhere.txt", "No such file"),
    ("ftk-generate --path RUN --input DATA", "directory"),
    ("ftk-generate --path RUN --input - --beam 0", "beam is 0"),
    ("ftk-generate --path RUN", "--input FILE"),
    ("ftk-validate DATA --path DATA", "checkpoint"),
    ("ftk-validate /nowhere --path RUN", "no such data folder"),
    ("ftk-validate DATA --path RUN --valid-subset vald", "no split 'vald'; there are: train, valid\n"),
    ("ftk-interactive --path /nowhere", "/nowhere"),
    ("ftk-checkpoint verify /nowhere", "/nowhere"),
    ("ftk-checkpoint explode", "unknown command 'explode'"),
    ("ftk-data stats /nowhere", "/nowhere"),
    ("ftk-data stats DATA,DATA", "no such folder; give one folder"),
    ("ftk-data show /nowhere --task glm_blank", "/nowhere"),
    ("ftk-data show /nowhere", "--task is missing; there are: causal_lm, classification, cloze, denoising, glm_blank"),
    (
        "ftk-preprocess --trainpref /nowhere.txt --destdir OUT --tokenizer sentencepiece --vocab-size 100",
        "/nowhere.txt",
    ),
    ("ftk-preprocess --trainpref DATA --destdir OUT --tokenizer bert_wordpiec", "did you mean 'bert_wordpiece'"),
    ("ftk-hydra-train --config-name nothing", "nothing"),
    ("ftk-hydra-train --config-name glm_tinny", "did you mean 'glm_tiny'?\n"),
    ("ftk-hydra-train --config-name glm_tiny training.max_updat=3", "max_updat"),
]


@pytest.mark.parametrize(("argv", "message"), USER_ERRORS, ids=[argv for argv, _ in USER_ERRORS])
def test_a_user_error_is_one_clear_line(argv, message, data_bin, run_folder, tmp_path, command):
    names = {"DATA": str(data_bin), "RUN": str(run_folder), "OUT": str(tmp_path / "out")}
    argv = [names.get(a, a).replace("DATA/", f"{data_bin}/") for a in argv.split()]
    done = command(*argv, cwd=tmp_path, code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 3
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_is_noticed(run_folder, data_bin, tmp_path, command):
    texts = ("--trainpref", data_bin.parent / "train.txt", "--validpref", data_bin.parent / "valid.txt")
    command("ftk-preprocess", *texts, "--vocab-size", 500, "--destdir", tmp_path / "other", code=0)
    before = (run_folder / "config.yaml").read_text()
    for argv in (
        ["ftk-validate", tmp_path / "other", "--path", run_folder],
        ["ftk-generate", tmp_path / "other", "--path", run_folder],
        ["ftk-train", tmp_path / "other", *TINY, "--max-update", 12, "--save-dir", run_folder],
    ):
        done = command(*argv, code=2)
        assert "another tokenizer" in done.stderr
    assert (run_folder / "config.yaml").read_text() == before  # a refused run changes nothing


def test_a_checkpoint_without_its_tokenizer_is_named(run_folder, tmp_path, command):
    import shutil

    shutil.copytree(run_folder / "checkpoint_10", tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "tokenizer")
    done = command("ftk-generate", "--path", tmp_path / "bare", "--input", "-", input="a [MASK]\n", code=2)
    assert "tokenizer" in done.stderr
    assert "Traceback" not in done.stderr
