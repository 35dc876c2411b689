"""ftk-preprocess from text to folder: the same whatever the workers, and whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from preprocessing import run, sentences, tree

from ftk.data import IndexedDataset
from ftk.data.corpora.corpus import IndexedCorpus, IndexedCorpusConfig
from ftk.data.inspect_data import stats, verify
from ftk.data.text import encoding as encoding_module
from ftk.data.text.encoding import EncoderPool, EncodingSettings
from ftk.data.text.files import cut_file, read_blocks
from ftk.errors import UserError
from ftk.tokenizers import build_tokenizer, load_tokenizer
from ftk_cli import data as data_command
from tests.processes import run_command, wait_until


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "train.txt"
    path.write_text("".join(f"{line}\n" for line in sentences(3000, seed=1)), encoding="utf-8")
    return path


def test_the_folder_holds_the_encoded_documents_and_explains_itself(tmp_path, corpus, model, capsys):
    valid = tmp_path / "valid.jsonl.gz"
    valid.write_bytes(gzip.compress(b'{"body": "the cat ."}\n\n{"body": "[MASK] on a mat ."}\n'))
    out = tmp_path / "data-bin"
    arguments = ["--trainpref", corpus, "--validpref", valid, "--text-key", "body", "--workers", 2]
    assert run(*arguments, "--destdir", out, "--tokenizer", "sentencepiece", "--tokenizer-path", model) == 0

    tokenizer = load_tokenizer(out)
    assert tokenizer.fingerprint == build_tokenizer("sentencepiece", path=model).fingerprint
    lines = corpus.read_text(encoding="utf-8").splitlines()
    train = IndexedDataset(out / "train")
    assert [row.tolist() for row in train] == [tokenizer.encode(line) for line in lines]
    masked = IndexedDataset(out / "valid")[1]
    assert tokenizer.special.mask not in masked
    assert tokenizer.decode(masked) == "[MASK] on a mat ."

    record = json.loads((out / "preprocess.json").read_text(encoding="utf-8"))
    assert record["splits"]["train"]["documents"] == 3000
    assert record["splits"]["train"]["tokens"] == train.num_tokens
    assert record["splits"]["train"]["bytes"] == corpus.stat().st_size
    assert record["splits"]["valid"]["skipped"] == {"empty": 1}
    assert record["tokenizer"] == {
        "name": "sentencepiece",
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
    }
    assert set(record["files"]) == set(tree(out)) - {"preprocess.json"}
    assert verify(out) == []

    shown = capsys.readouterr()
    assert "train      3,000" in shown.out
    assert "valid: skipped 1 empty" in shown.out
    assert f"ftk-train {out}" in shown.out


def test_workers_started_anew_encode_the_same(tmp_path, corpus, model, monkeypatch):
    """Where there is no fork, workers are spawned and get everything by message."""
    build_tokenizer("sentencepiece", path=model).save(tmp_path / "tokenizer")
    settings = EncodingSettings(tmp_path / "tokenizer", np.dtype("<u2"))

    def tokens() -> list[int]:
        with EncoderPool(2, settings) as pool:
            blocks = pool.encode([part] for part in cut_file(str(corpus), "line", 20_000))
            return np.concatenate([block.tokens for block in blocks]).tolist()

    forked = tokens()
    monkeypatch.setattr("ftk.data.text.child_process.sys.platform", "elsewhere")
    assert tokens() == forked


def test_a_model_is_trained_where_no_vocabulary_is_given(tmp_path, corpus):
    out = tmp_path / "data-bin"
    assert run("--trainpref", corpus, "--destdir", out, "--vocab-size", 285, "--workers", 1) == 0
    assert load_tokenizer(out).num_text_tokens == 285
    assert verify(out) == []


def test_a_plugins_tokenizer_encodes_in_the_workers(tmp_path, corpus, model):
    plugin = tmp_path / "backwards_plugin.py"
    plugin.write_text(
        textwrap.dedent(
            """
            from ftk.registry import register_tokenizer
            from ftk.tokenizers.base import TokenizerConfig
            from ftk.tokenizers.sentencepiece import SentencePieceTokenizer

            @register_tokenizer("backwards", config=TokenizerConfig)
            class Backwards(SentencePieceTokenizer):
                name = "backwards"

                def _encode_texts(self, texts):
                    return [ids[::-1] for ids in super()._encode_texts(texts)]
            """
        )
    )
    arguments = ["--trainpref", corpus, "--destdir", tmp_path / "out", "--tokenizer-path", model, "--workers", 2]
    for name in (["--tokenizer", "backwards"], ["--tokenizer=backwards", "--overwrite"]):
        done = run_command("ftk-preprocess", *arguments, *name, "--user-dir", plugin)
        assert done.returncode == 0, done.stderr
    plain = build_tokenizer("sentencepiece", path=model)
    line = corpus.read_text(encoding="utf-8").split("\n")[0]
    assert IndexedDataset(tmp_path / "out" / "train")[0].tolist() == plain.encode(line)[::-1]


@pytest.mark.parametrize("name", ["line", "blank-line", "file"])
def test_document_separators(tmp_path, model, name):
    path = tmp_path / "a.txt"
    path.write_text("the cat .\na mat .\n\nold house .\n", encoding="utf-8")
    arguments = ["--trainpref", path, "--destdir", tmp_path / "out", "--tokenizer-path", model, "--workers", 1]
    assert run(*arguments, "--document-separator", name) == 0
    assert len(IndexedDataset(tmp_path / "out" / "train")) == {"line": 3, "blank-line": 2, "file": 1}[name]


def test_several_files_follow_each_other(tmp_path, model):
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "old house ."}\n' if name == "b.jsonl" else "the cat .", "utf-8")
    files = f"{tmp_path / 'b.jsonl'},{tmp_path / 'a.txt'}"
    assert run("--testpref", files, "--destdir", tmp_path / "out", "--tokenizer-path", model, "--workers", 1) == 0
    tokenizer = load_tokenizer(tmp_path / "out")
    dataset = IndexedDataset(tmp_path / "out" / "test")
    assert [tokenizer.decode(row) for row in dataset] == ["old house .", "the cat ."]


def test_the_first_bad_document_stops_the_run(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setattr("ftk.data.text.preprocess.cut_file", lambda *args, **rest: cut_file(*args, 50, **rest))
    path = tmp_path / "bad.txt"
    path.write_bytes(b"a good line of the cat\n" * 20 + b"bad \xff\n" + b"good\n" * 9 + b"bad \xfe\n")
    assert run("--trainpref", path, "--destdir", tmp_path / "out", "--tokenizer-path", model, "--workers", 2) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"ftk-preprocess: {path}:21: (byte 464) invalid UTF-8 (0xFF: invalid start byte); ")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.txt"]


def test_bad_documents_are_skipped_counted_and_listed(tmp_path, model, capsys):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"the cat\nbad \xff\n\n\nnul \x00\na mat\n\xe2\x80\x8b\xff\n")
    arguments = ["--trainpref", path, "--destdir", tmp_path / "out", "--tokenizer-path", model]
    assert run(*arguments, "--on-error", "skip") == 0
    train = json.loads((tmp_path / "out" / "preprocess.json").read_text())["splits"]["train"]
    assert train["documents"] == 2
    assert train["skipped"] == {"empty": 2, "invalid_utf8": 2, "nul": 1}
    assert [(p["reason"], p["line"], p["offset"]) for p in train["problems"]] == [
        ("invalid_utf8", 2, 12),
        ("nul", 5, 20),
        ("invalid_utf8", 7, 31),
    ]
    assert "train: skipped 2 empty, 2 invalid_utf8, 1 nul; listed in" in capsys.readouterr().out


MODEL = "MODEL"  # stands for the fixture's path
TEXT, ENCODED = ["--trainpref", "a.txt"], ["--trainpref", "a.txt", "--tokenizer-path", MODEL]
TRAINED = ["--trainpref", "a.txt", "--vocab-size", "300"]
USER_ERRORS = {
    "nothing to do": ([], "give at least one"),
    "missing file": (["--trainpref", "nowhere.txt", "--vocab-size", "280"], "nowhere.txt: no such file"),
    "pattern": (["--trainpref", "*.none", "--vocab-size", "280"], "*.none: no file matches"),
    "no vocabulary": (TEXT, "give --tokenizer-path (a vocabulary), or --vocab-size"),
    "both": ([*ENCODED, "--vocab-size", "9"], "leave out one of the two"),
    "other tokenizer": ([*TEXT, "--tokenizer", "gpt2_bpe"], "--tokenizer-path is missing"),
    "unknown tokenizer": ([*TEXT, "--tokenizer", "gpt3"], "unknown tokenizer 'gpt3'"),
    "training without text": (["--validpref", "a.txt", "--vocab-size", "300"], "give --trainpref"),
    "vocabulary too large": ([*TEXT, "--vocab-size", "30000"], "30000"),
    "workers": ([*TRAINED, "--workers", "0"], "workers is 0"),
    "choice": ([*TEXT, "--on-error", "ignore"], "must be one of raise, skip"),
    "bad vocabulary": ([*TEXT, "--tokenizer-path", "a.txt"], "a.txt"),
    "file as destination": ([*TRAINED, "--destdir", "a.txt"], "a file, not"),
    "file as parent": ([*TRAINED, "--destdir", "a.txt/b"], "is a file, not"),
    "ratio of all": ([*ENCODED, "--valid-ratio", "1"], "valid_ratio is 1.0; it must be at least 0 and below 1"),
    "ratios of all": ([*ENCODED, "--valid-ratio", "0.5", "--test-ratio", "0.5"], "valid_ratio + test_ratio is 1.0"),
    "two sources": ([*ENCODED, "--validpref", "a.txt", "--valid-ratio", "0.1"], "both make the split"),
    "ratio without text": (
        ["--validpref", "a.txt", "--tokenizer-path", MODEL, "--test-ratio", "0.1"],
        "test_ratio is 0.1, but there is no trainpref to take documents from",
    ),
    "limits": ([*ENCODED, "--min-tokens", "5", "--max-tokens-per-document", "4"], "max_tokens_per_document is 4"),
    "no tokens": ([*ENCODED, "--min-tokens", "0"], "min_tokens is 0; it must be at least 1"),
    "normal form": ([*ENCODED, "--normalize", "nfd"], "must be one of none, nfc, nfkc"),
    "too small": (
        [*ENCODED, "--valid-ratio", "0.0001"],
        "no documents for valid (skipped: 1 empty); valid_ratio is 0.0001",
    ),
    "all too short": ([*ENCODED, "--min-tokens", "500"], "no documents for train (skipped: 1 empty, 20 too_short)"),
    "no end token": ([*ENCODED, "--append-eos"], "--append-eos: the tokenizer sentencepiece has no end token"),
    "no fields": (
        [*ENCODED, "--text-key", "body"],
        "text_key is 'body', but no input is read as JSON lines; give --format jsonl, or leave --text-key out",
    ),
}


def test_the_command_alone_says_what_it_needs(capsys):
    assert run() == 2
    shown = capsys.readouterr().err
    assert "give at least one" in shown
    assert "--destdir is missing" in shown


@pytest.mark.parametrize("case", USER_ERRORS)
def test_mistakes_are_one_clear_message_and_leave_nothing(tmp_path, monkeypatch, capsys, model, case):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("\n".join([*sentences(20), ""]) + "\n")
    arguments, message = USER_ERRORS[case]
    destination = [] if "--destdir" in arguments else ["--destdir", "out"]
    assert run(*(model if argument == MODEL else argument for argument in arguments), *destination) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_an_existing_folder_is_replaced_only_when_asked_and_only_if_it_is_ours(tmp_path, corpus, model, capsys):
    out = tmp_path / "out"
    arguments = ["--trainpref", corpus, "--destdir", out, "--tokenizer-path", model, "--workers", 1]
    out.mkdir()  # an empty folder is as good as none
    assert run(*arguments) == 0
    before = tree(out)
    assert run(*arguments) == 2
    assert "exists already; choose another, or replace it with --overwrite" in capsys.readouterr().err

    corpus.write_bytes(b"good\n\xff\n")
    assert run(*arguments, "--overwrite") == 2  # a failed run keeps the old folder
    assert tree(out) == before
    corpus.write_text("the old house .\n")
    (out / "notes.txt").write_text("mine")
    assert run(*arguments, "--overwrite") == 2
    assert "did not write (notes.txt)" in capsys.readouterr().err
    (out / "notes.txt").unlink()
    assert tree(out) == before
    assert run(*arguments, "--overwrite") == 0
    assert len(IndexedDataset(out / "train")) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "train.txt"]


@pytest.mark.parametrize(("number", "message"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_in_the_middle_leaves_nothing(tmp_path, model, number, message):
    """The text comes through a pipe that stays open, so the run is in the middle for certain."""
    pipe = tmp_path / "endless.txt"
    os.mkfifo(pipe)
    script = "import signal, sys; from ftk_cli.preprocess import main; "
    script += "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main())"
    arguments = ["--trainpref", pipe, "--destdir", tmp_path / "out", "--tokenizer-path", model, "--workers", "2"]
    command = [sys.executable, "-c", script, *map(str, arguments)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with open(pipe, "w", encoding="utf-8") as writer:
        for line in sentences(60_000):
            writer.write(f"{line}\n")
        writer.flush()
        wait_until(lambda: list(tmp_path.glob("out.tmp-*/train.bin.tmp-*")), process)
        os.killpg(process.pid, number)  # as a terminal does: the workers get it too
        _, shown = process.communicate(timeout=300)
    assert process.returncode == 1
    assert shown.splitlines()[-1].startswith(f"ftk-preprocess: {message}")
    assert "Traceback" not in shown
    assert [p.name for p in tmp_path.iterdir()] == ["endless.txt"]


def test_ctrl_c_ends_the_training_of_a_model_at_once(tmp_path):
    """SentencePiece itself does not listen to signals."""
    corpus = tmp_path / "train.txt"
    corpus.write_text("\n".join(f"{line} {i * 7919 % 10007:x}" for i, line in enumerate(sentences(60_000))))
    arguments = ["--trainpref", corpus, "--destdir", tmp_path / "out", "--vocab-size", "8000"]
    script = "import signal, sys; from ftk_cli.preprocess import main; "
    script += "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main())"
    process = subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.readline()
    assert "training a SentencePiece model of 8000 pieces" in said
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=300)
    assert process.returncode == 1
    assert shown.splitlines() == ["ftk-preprocess: interrupted"]
    assert [p.name for p in tmp_path.iterdir()] == ["train.txt"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_that_becomes_shorter_is_one_line_and_leaves_nothing(
    tmp_path, corpus, model, capsys, monkeypatch, workers
):
    size = corpus.stat().st_size

    def parts(path, *arguments, **rest):
        items = list(cut_file(path, *arguments, 1000, **rest))
        os.truncate(path, 5000)
        return iter(items)

    monkeypatch.setattr("ftk.data.text.preprocess.cut_file", parts)
    out = tmp_path / "out"
    assert run("--trainpref", corpus, "--destdir", out, "--tokenizer-path", model, "--workers", workers) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"ftk-preprocess: File became shorter while it was read (it ends at byte 5,000 of {size:,}; "
        f"run again when nothing writes to it): {corpus}"
    )
    assert os.listdir(tmp_path) == ["train.txt"]


def test_documents_that_are_too_large_are_named_or_skipped(tmp_path, model, capsys):
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text("one bird\n" + "the cat sat " * 100 + "\ntwo trees\n")
    arguments = ["--trainpref", path, "--destdir", out, "--tokenizer-path", model, "--max-document-bytes", 1000]
    assert run(*arguments) == 2
    assert f"{path}:2: (byte 9) a document of more than 1,000 bytes" in capsys.readouterr().err
    assert run(*arguments, "--on-error", "skip") == 0
    assert len(IndexedDataset(out / "train")) == 2
    assert json.loads((out / "preprocess.json").read_text())["splits"]["train"]["skipped"] == {"too_large": 1}


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_is_read_behind_the_document_that_ends_the_run(tmp_path, model, capsys, monkeypatch, workers):
    """A device has no end, nor has a pipe whose writer waits."""
    text, out = tmp_path / "a.txt.gz", tmp_path / "out"
    text.write_bytes(gzip.compress(b"one bird\n" + b"x" * 300_000 + b"\ntwo trees\n"))

    def blocks(path, *arguments, **rest):
        for item in cut_file(path, *arguments, **rest):
            yield item
            assert item.problem is None

    monkeypatch.setattr("ftk.data.text.preprocess.cut_file", blocks)
    arguments = ["--trainpref", text, "--destdir", out, "--tokenizer-path", model, "--workers", workers]
    assert run(*arguments, "--max-document-bytes", 1000) == 2
    assert f"{text}:2: (byte 9) a document of more than 1,000 bytes" in capsys.readouterr().err


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"\nPPid:\t{pid}\n" in (entry / "status").read_text():
                found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_children_end_with_a_killed_parent_and_the_next_run_clears_what_it_left(tmp_path, model, number, trains):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    words = [f"{line} {i * 7919 % 10007:x}\n" for i, line in enumerate(sentences(60_000))]
    if trains:
        text.write_text("".join(words))
    else:
        os.mkfifo(text)
    options = ["--vocab-size", "8000"] if trains else ["--tokenizer-path", str(model), "--workers", "3"]
    command = [sys.executable, "-c", "import sys; from ftk_cli.preprocess import main; sys.exit(main())"]
    command += ["--trainpref", str(text), "--destdir", str(out), *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with contextlib.nullcontext() if trains else open(text, "w", encoding="utf-8") as writer:
            if writer is not None:
                writer.writelines(words)
                writer.flush()
            deadline = time.monotonic() + 60
            wanted = "out.tmp-*" if trains else "out.tmp-*/train.bin.tmp-*"
            while not list(tmp_path.glob(wanted)) or len(children_of(process.pid)) < (2 if trains else 3):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            children = children_of(process.pid)
            process.send_signal(number)
            process.wait()
            while any(map(is_alive, children)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert bool(list(tmp_path.glob("out.tmp-*"))) == (number == signal.SIGKILL)
    (tmp_path / "good.txt").write_text("one bird\n")
    assert run("--trainpref", tmp_path / "good.txt", "--destdir", out, "--tokenizer-path", model) == 0
    assert sorted(os.listdir(tmp_path)) == ["good.txt", "out", "text.txt"]


def _small_disk() -> None:
    """A file-size limit stands for the disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, corpus, model):
    arguments = ["--trainpref", corpus, "--destdir", tmp_path / "out", "--tokenizer-path", model, "--workers", 1]
    done = run_command("ftk-preprocess", *arguments, before=_small_disk)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ftk-preprocess: {os.strerror(errno.EFBIG)}: {tmp_path / 'out'}")
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["train.txt"]


class _Killed:
    """Stands for a tokenizer whose process is killed while it encodes."""

    batch_bytes = 1 << 17

    def encode_rows(self, texts):
        os.kill(os.getpid(), signal.SIGKILL)


class _Broken:
    batch_bytes = 1 << 17

    def encode_rows(self, texts):
        raise ZeroDivisionError("inside the tokenizer")


class _Liar:
    batch_bytes = 1 << 17

    def encode_rows(self, texts):
        return [[70_000] for _ in texts]


class _LiarWithArrays(_Liar):
    def encode_rows(self, texts):
        return [np.array([70_000 * (i == 1)], dtype=np.int32) for i, _ in enumerate(texts)]


@pytest.mark.parametrize(
    ("tokenizer", "error", "message"),
    [
        (_Killed, RuntimeError, "ended with exit code -9; killed, perhaps because memory ran out"),
        (_Broken, RuntimeError, "a worker process failed: ZeroDivisionError: inside the tokenizer"),
        (_Liar, UserError, "token id 70000 of document 0 is not in 0..65535"),
        (_LiarWithArrays, UserError, "token id 70000 of document 1 is not in 0..65535"),
    ],
)
def test_what_befalls_a_worker_is_said(tmp_path, corpus, monkeypatch, tokenizer, error, message):
    monkeypatch.setattr(encoding_module, "_load", lambda settings: tokenizer())
    with (
        pytest.raises(error, match=message),
        EncoderPool(2, EncodingSettings(tmp_path, np.dtype("<u2"))) as pool,
    ):
        list(pool.encode([part] for part in cut_file(str(corpus), "line", 5000)))


def test_documents_without_tokens_are_counted(tmp_path, monkeypatch):
    class Deaf:
        batch_bytes = 1 << 17

        def encode_rows(self, texts):
            return [[] if text == "silence" else [1, 2] for text in texts]

    path = tmp_path / "a.txt"
    path.write_text("a\nsilence\nb\n\n")
    monkeypatch.setattr(encoding_module, "_load", lambda settings: Deaf())
    with EncoderPool(1, EncodingSettings(tmp_path, np.dtype("<u2"))) as pool:
        (block,) = pool.encode([block] for block in read_blocks(str(path), "line"))
    assert (block.tokens.tolist(), block.lengths.tolist()) == ([1, 2, 1, 2], [2, 2])
    assert +block.skipped == {"no_tokens": 1, "empty": 1}


def test_a_part_is_encoded_in_batches_of_the_size_that_the_tokenizer_likes(tmp_path, corpus, monkeypatch):
    class Counting:
        def __init__(self, batch_bytes):
            self.batch_bytes = batch_bytes
            self.batches = []

        def encode_rows(self, texts):
            self.batches.append(len(texts))
            return [[len(text)] for text in texts]

    settings = EncodingSettings(tmp_path, np.dtype("<u2"))
    (part,) = cut_file(str(corpus), "line")
    whole, many = Counting(1 << 30), Counting(500)
    expected, block = (encoding_module.encode_blocks([part], tokenizer, settings) for tokenizer in (whole, many))
    assert len(whole.batches) == 1
    assert len(many.batches) >= part.stop / 500
    assert sum(many.batches) == sum(whole.batches)
    for name in ("tokens", "lengths", "hashes"):
        np.testing.assert_array_equal(getattr(block, name), getattr(expected, name))
    assert block.skipped == expected.skipped


# --- stats and verify ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "train.txt").write_text("".join(f"{line}\n" for line in sentences(3000, seed=1)), encoding="utf-8")
    arguments = ["--tokenizer-path", model, "--workers", 1]
    assert run("--trainpref", folder / "train.txt", "--destdir", folder / "data-bin", *arguments) == 0
    return folder / "data-bin"


@pytest.fixture
def made(tmp_path, folder) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "data-bin"))


def test_stats_counts_what_is_there(made, capsys):
    assert data_command.main(["stats", str(made)]) == 0
    shown = capsys.readouterr().out
    dataset = IndexedDataset(made / "train")
    assert f"train: 3,000 documents, {dataset.num_tokens:,} tokens (uint16)" in shown
    assert f"greatest {dataset.sizes.max():,}" in shown
    for low, high in ((8, 15), (16, 31)):
        count = int(((dataset.sizes >= low) & (dataset.sizes <= high)).sum())
        row = next(line for line in shown.splitlines() if line.split()[:1] == [f"{low}-{high}"])
        assert row.split()[1] == f"{count:,}"
    assert shown == stats(made) + "\n"


def alter(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)


DAMAGE = {
    "token": (lambda d: alter(d / "train.bin", 0), r"train.bin: its sha256 is not the one"),
    "vocabulary": (lambda d: alter(d / "train.bin", 1), r"train.bin: holds token \d+, outside the vocabulary"),
    "data cut": (lambda d: os.truncate(d / "train.bin", 100), r"train.bin: 100 bytes, but sequence"),
    "index cut": (lambda d: os.truncate(d / "train.idx", 100), r"train.idx: 100 bytes, preprocess.json says"),
    "index gone": (lambda d: (d / "train.idx").unlink(), r"train.idx: missing"),
    "length": (lambda d: alter(d / "train.idx", 34), r"sequence 1 starts at byte"),
    "stranger": (lambda d: (d / "x.txt").write_text("x"), r"x.txt: not listed in preprocess.json"),
    "tokenizer": (lambda d: alter(d / "tokenizer" / "sentencepiece.model"), r"sentencepiece.model: its sha256"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_verify_finds_damage(made, capsys, case):
    assert data_command.main(["verify", str(made)]) == 0
    assert "all files are as ftk-preprocess wrote them" in capsys.readouterr().out
    damage, message = DAMAGE[case]
    damage(made)
    assert data_command.main(["verify", str(made)]) == 2
    shown = capsys.readouterr().err

    assert re.search(message, shown)
    assert "Traceback" not in shown


@pytest.mark.parametrize("command", ["stats", "verify"])
def test_what_is_no_data_folder_is_refused(tmp_path, capsys, command):
    (tmp_path / "file").write_text("x")
    for name, message in (("none", "no such folder"), ("file", "a file; give the folder"), (".", "give ")):
        assert data_command.main([command, str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


NO_RECORDS = {
    "half of it": b"{",
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "no files": b'{"files": 1, "splits": {}, "tokenizer": null}',
    "files of other types": b'{"files": {"train.bin": 1}, "splits": {}, "tokenizer": null}',
    "bytes of another type": b'{"files": {"train.bin": {"bytes": "1"}}, "splits": {}, "tokenizer": null}',
    "huge bytes": b'{"files": {"train.bin": {"bytes": 1%s}}, "splits": {}, "tokenizer": null}' % (b"0" * 100),
    "a checksum of another type": b'{"files": {"a": {"bytes": 1, "sha256": 1}}, "splits": {}, "tokenizer": null}',
    "a file elsewhere": b'{"files": {"../a": {"bytes": 1}}, "splits": {}, "tokenizer": null}',
    "a file at the root": b'{"files": {"/a": {"bytes": 1}}, "splits": {}, "tokenizer": null}',
    "a NUL in a name": b'{"files": {"a\\u0000": {"bytes": 1}}, "splits": {}, "tokenizer": null}',
    "splits of another type": b'{"files": {}, "splits": [1], "tokenizer": null}',
    "documents of another type": b'{"files": {}, "splits": {"train": {"documents": true}}, "tokenizer": null}',
    "no tokenizer": b'{"files": {}, "splits": {}}',
    "a tokenizer of another type": b'{"files": {}, "splits": {}, "tokenizer": "x"}',
    "a vocabulary of another type": b'{"files": {}, "splits": {}, "tokenizer": {"vocab_size": "1", "fingerprint": ""}}',
    "a fingerprint of another type": b'{"files": {}, "splits": {}, "tokenizer": {"vocab_size": 1, "fingerprint": []}}',
    "a pipe": None,
}


@pytest.mark.parametrize("case", NO_RECORDS)
def test_whatever_stands_in_the_place_of_the_record_is_one_line(made, capsys, case):
    record = made / "preprocess.json"
    record.unlink()
    if NO_RECORDS[case] is None:
        os.mkfifo(record)
    else:
        record.write_bytes(NO_RECORDS[case])
    assert data_command.main(["verify", str(made)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{record}: damaged" in line
    with pytest.raises(UserError, match="is damaged"):
        IndexedCorpus(IndexedCorpusConfig(data=str(made))).tokenizer()


@pytest.mark.parametrize("name", ["train.idx", "train.bin"])
def test_a_pipe_in_the_place_of_a_data_file_is_one_line(made, capsys, name):
    (made / name).unlink()
    os.mkfifo(made / name)
    assert data_command.main(["stats", str(made)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{made / name}: not a regular file" in line
