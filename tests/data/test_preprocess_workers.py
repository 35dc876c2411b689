"""ftk-preprocess that is broken off, or whose workers fail: one message, and nothing is left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from preprocessing import run, sentences

from ftk.data import IndexedDataset
from ftk.data.text import encoding as encoding_module
from ftk.data.text.encoding import EncoderPool, EncodingSettings
from ftk.data.text.files import cut_file, read_blocks
from ftk.errors import UserError
from tests.processes import run_command, small_files_only, wait_until
from tests.tiers import slow_but


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


def is_locked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
@pytest.mark.parametrize(
    ("number", "trains"),
    slow_but([(signal.SIGKILL, True), (signal.SIGHUP, False)], product((signal.SIGKILL, signal.SIGHUP), (True, False))),
)
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
            deadline = time.monotonic() + 300
            wanted = "out.tmp-*" if trains else "out.tmp-*/train.bin.tmp-*"
            while not list(tmp_path.glob(wanted)) or len(children_of(process.pid)) < (2 if trains else 3):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            children = children_of(process.pid)
            process.send_signal(number)
            process.wait()
            # A child whose first thread has ended is a zombie, and may hold its locks a moment longer.
            while any(map(is_alive, children)) or any(map(is_locked, tmp_path.glob("out.tmp-*"))):
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert bool(list(tmp_path.glob("out.tmp-*"))) == (number == signal.SIGKILL)
    (tmp_path / "good.txt").write_text("one bird\n")
    assert run("--trainpref", tmp_path / "good.txt", "--destdir", out, "--tokenizer-path", model) == 0
    assert sorted(os.listdir(tmp_path)) == ["good.txt", "out", "text.txt"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, corpus, model):
    arguments = ["--trainpref", corpus, "--destdir", tmp_path / "out", "--tokenizer-path", model, "--workers", 1]
    done = run_command("ftk-preprocess", *arguments, before=small_files_only, code=1)
    reason = f"{os.strerror(errno.EFBIG)} for ulimit -f or the file system"
    assert done.stderr.splitlines()[-1].startswith(f"ftk-preprocess: {reason}: {tmp_path / 'out'}")
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
    with pytest.raises(error, match=message), EncoderPool(2, EncodingSettings(tmp_path, np.dtype("<u2"))) as pool:
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
