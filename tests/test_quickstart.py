"""The quickstart, from text to filled blanks; its text; and interrupted in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import wait_until

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ["bash", str(ROOT / "scripts" / "quickstart.sh")]


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """The environment that runs the tests stands in for the one that the script would make."""
    bin_folder = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "FTK_QUICKSTART_DIR": str(tmp_path / "out"),
        "FTK_QUICKSTART_UPDATES": "8",
        "FTK_NO_INSTALL": "1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.mark.slow
def test_it_goes_all_the_way_and_fills_more_than_twice_what_the_most_frequent_word_would(environment, tmp_path):
    leftover = tmp_path / "out" / "run" / "metrics.jsonl"  # of a run before: this one starts afresh
    leftover.parent.mkdir(parents=True)
    leftover.write_text("left over")
    (tmp_path / "out" / ".ftk-quickstart").touch()
    environment["FTK_QUICKSTART_UPDATES"] = "2000"  # of 3600, which end at 1.7 below the unigram loss
    done = subprocess.run(SCRIPT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    assert not leftover.read_text().startswith("left over")
    assert (tmp_path / "out" / ".ftk-quickstart").exists()  # so that the next one may, too
    figures = dict(re.findall(r"^(loss|unigram_loss) +(\d+\.\d+)$", done.stdout, re.MULTILINE))
    assert float(figures["loss"]) < float(figures["unigram_loss"]) - 1.2
    blanks = (tmp_path / "out" / "text" / "blanks.txt").read_text().splitlines()
    for line in blanks:
        assert f"> {line}" in done.stdout
    assert done.stdout.count("  p = ") == sum(line.count("[MASK]") for line in blanks)
    sentence = r"^Of 1000 held-out lines with one word hidden, the model fills (\d+) exactly.* would be right in (\d+) "
    (filled, frequent) = re.findall(sentence, done.stdout, re.MULTILINE)[0]
    assert int(filled) > 2 * int(frequent)
    assert (tmp_path / "out" / "run" / "checkpoint_best").is_dir()


def test_the_text_is_real_and_none_of_the_held_out_lines_is_trained_on(tmp_path):
    subprocess.run([sys.executable, str(ROOT / "scripts" / "quickstart_text.py"), str(tmp_path)], check=True)
    train, valid = (
        [json.loads(line)["text"] for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "valid")
    )
    assert len(train) > 20_000
    assert len(valid) > 2_000
    assert not set(train) & set(valid)
    prompts = (tmp_path / "words.txt").read_text().splitlines()
    words = json.loads((tmp_path / "words.json").read_text())
    assert len(prompts) == len(words) == 1000
    held_out = set(valid)
    assert all(prompt.replace("[MASK]", word) in held_out for prompt, word in zip(prompts, words, strict=True))


def test_the_score_is_of_the_words_that_were_hidden(tmp_path):
    (tmp_path / "words.json").write_text(json.dumps(["self", "if", "self", "in"]))
    answers = "".join(json.dumps({"answers": [{"text": text}]}) + "\n" for text in ("self ", "if", "if", "in"))
    command = [sys.executable, str(ROOT / "scripts" / "quickstart_text.py"), "--score", str(tmp_path)]
    done = subprocess.run(command, input=answers, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "Of 4 held-out lines with one word hidden, the model fills 3 exactly (75.0%); the most frequent of these "
        "words, 'self', would be right in 2 (50.0%).\n"
    )


def test_a_folder_of_the_users_is_not_removed(environment, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    done = subprocess.run(SCRIPT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert (tmp_path / "out" / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file.txt"], "quickstart: no-such-file.txt: there is no such file or folder\n"),
        (["--halp"], "quickstart: unknown option --halp; bash scripts/quickstart.sh --help shows how it is called\n"),
        (["a", "b"], "quickstart: it takes one file or folder of text, not 2; put them into one folder\n"),
    ],
)
def test_a_mistake_is_said_before_anything_is_installed(environment, tmp_path, arguments, message):
    environment |= {"FTK_NO_INSTALL": "", "FTK_VENV": str(tmp_path / "venv")}
    done = subprocess.run([*SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (2, message)
    done = subprocess.run([*SCRIPT, "--help"], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bash scripts/quickstart.sh [FILE_OR_FOLDER]\n" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_own_text_in_chinese(environment, test_data, tmp_path):
    own = test_data / "chinese" / "valid.jsonl"
    done = subprocess.run([*SCRIPT, str(own)], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  p = ") == (tmp_path / "out" / "text" / "blanks.txt").read_text().count("[MASK]")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "mine.txt",
            "One line. Two sentences.\n" * 9999,
            ": too little text: lines or sentences that differ: 2; give at least 100, better thousands",
        ),
        (
            "gbk.txt",
            "今天天气很好。\n",
            ":1: (byte 0) invalid UTF-8 (0xBD: invalid start byte); convert the file to UTF-8, e.g. with iconv -f "
            "GB18030 -t UTF-8 if it is Chinese (GBK)",
        ),
        ("rows.jsonl", '\n{"title": ""}\n', ':2: (byte 1) no field "text" (fields: "title")'),
    ],
)
def test_what_is_wrong_with_own_text_is_one_line(environment, tmp_path, name, text, message):
    own = tmp_path / name
    own.write_text(text, "gb18030")
    done = subprocess.run([*SCRIPT, str(own)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"quickstart: {own}{message}"
    assert done.stderr.count("quickstart: ") == 1 + ("other processes hold" in done.stderr)


def test_a_text_without_line_ends_is_cut_into_sentences(tmp_path):
    own = tmp_path / "mine"
    (own / ".git").mkdir(parents=True)
    (own / ".git" / "objects").write_bytes(b"\xff\xfe")  # hidden, and no text
    (own / "text").write_text(" ".join(f"Number {number} flies." for number in range(100)))
    command = [sys.executable, str(ROOT / "scripts" / "quickstart_text.py"), str(tmp_path / "out"), str(own)]
    subprocess.run(command, check=True)
    assert len((tmp_path / "out" / "valid.jsonl").read_text().splitlines()) == 10


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_broken(environment, tmp_path):
    environment.pop("FTK_QUICKSTART_UPDATES")
    process = subprocess.Popen(
        SCRIPT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until((tmp_path / "out" / "run" / "metrics.jsonl").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in errors
    out = tmp_path / "out"
    command = f"ftk-train {out}/data-bin --config configs/quickstart.yaml --max-update 3600 --save-dir {out}/run"
    assert errors.endswith(f"quickstart: stopped; the command that continues is {command}\n")
    assert not list((tmp_path / "out").rglob("*.tmp*"))
