"""What all commands share: one line for whatever fails, signals, full disks, and nonsense in the environment."""

from __future__ import annotations

import json
import logging
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftk.errors import Diverged, LogFormatter, UserError
from ftk.trainer.log.log_file import LogFile
from ftk.trainer.signals import StopSignals
from ftk_cli import ranks
from ftk_cli.command import describe, run
from tests.cli.test_ranks import arguments, wait_for_updates  # noqa: F401

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs a Unix")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x"}, "the environment variable RANK is 'x'; it must be a whole number from 0 to 999,999"),
        ({"WORLD_SIZE": ""}, "the environment variable WORLD_SIZE is ''; it must be a whole number from 1"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2'"),
        ({"RANK": "9" * 5000, "WORLD_SIZE": "2"}, "RANK is '999"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "the environment variable RANK is 2, but WORLD_SIZE is 2; use torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "\x1b[2J"}, r"LOCAL_RANK is '\x1b[2J'"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "tcp://x:80"}, "MASTER_PORT is 'tcp://x:80'"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "70000"}, "it must be a whole number from 0 to 65,535"),
    ],
    ids=str,
)
def test_nonsense_in_torchruns_variables_is_one_line(monkeypatch, capsys, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run("ftk-train", lambda argv: pytest.fail("is not run"), []) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("ftk-train: the environment variable")
    assert error.count("\n") == 1


def test_a_master_port_of_kubernetes_is_none_of_ours(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.1:80")
    assert run("ftk-train", lambda argv: 0, []) == 0


def test_a_hang_up_ends_a_command_as_sigterm_does_unless_it_is_ignored(capsys):
    cleaned = []

    def body(argv):
        try:
            os.kill(os.getpid(), signal.SIGHUP)
            return 0
        finally:
            cleaned.append(True)

    assert run("ftk-data", body, []) == 1
    assert capsys.readouterr().err == "ftk-data: terminated (SIGHUP)\n"
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert run("ftk-data", body, []) == 0
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert cleaned == [True, True]


def test_a_run_whose_terminal_is_closed_is_saved(arguments, tmp_path):  # noqa: F811
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_for_updates(tmp_path / "run", 2)
        os.close(terminal)  # the kernel sends SIGHUP, and what the run writes to its terminal is an error
        deadline = time.monotonic() + 120
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (tmp_path / "run" / "checkpoint_last").resolve().name == f"checkpoint_{last['num_updates']}"
    [start] = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert "SIGHUP" in start["end"]["reason"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("argument", ["--help", "--version"])
@pytest.mark.parametrize("name", ["ftk-plan", "ftk-env", "ftk-report"])
def test_a_full_disk_behind_the_output_is_one_line(command, name, argument):
    done = command(name, argument, stdout=Path("/dev/full"))
    assert (done.returncode, done.stderr) == (1, f"{name}: No space left on device\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_torch_does_not_list_its_cache_when_its_import_is_interrupted():
    code = "import logging; from ftk_cli import command; command._set_up_log(); logging.getLogger('{}').info('seen')"
    for name, seen in (("ftk", 1), ("torch._subclasses.fake_tensor", 0)):
        done = subprocess.run([sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=True)
        assert done.stderr.count("seen") == seen


def test_an_interruption_waits_for_the_end_of_torchs_import(tmp_path):
    interrupts = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(0.5); print('whole')"
    (tmp_path / "torch.py").write_text(interrupts)
    code = f"import sys, time; sys.path.insert(0, {str(tmp_path)!r}); from ftk_cli.command import run; "
    code += "sys.exit(run('ftk-x', lambda argv: [__import__('torch'), time.sleep(60)], []))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "whole\n", "ftk-x: interrupted\n")


def test_a_log_file_that_cannot_be_written_any_more_costs_one_line(caplog, capsys):
    with LogFile("/dev/full", 10):
        for number in range(3):
            logging.getLogger("ftk").warning("line %d", number)
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "/dev/full" in text] == [
        "/dev/full: cannot be written (No space left on device); its lines are kept for later",
        "/dev/full: the last lines are lost (No space left on device)",
    ]
    assert [text for text in said if text.startswith("line")] == ["line 0", "line 1", "line 2"]
    assert "Traceback" not in capsys.readouterr().err


def test_a_pipe_without_a_reader_is_no_log_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"`log_file` .*pipe: cannot be written \(No such device or address\)"):
        LogFile(str(tmp_path / "pipe"), 10)


def test_control_characters_of_files_are_shown_in_log_lines_and_in_torchruns_report(tmp_path, monkeypatch):
    record = logging.LogRecord("ftk", logging.WARNING, "", 0, "%s: left out", ("a\x1b[31m\r\u202e.txt",), None)
    assert LogFormatter().format(record).endswith(" | WARNING | a\\x1b[31m\\r\\u202e.txt: left out")
    assert (
        LogFormatter("process 3").format(record).endswith(" | WARNING | process 3 | a\\x1b[31m\\r\\u202e.txt: left out")
    )
    monkeypatch.setenv(ranks.ERROR_FILE, str(tmp_path / "error.json"))
    try:
        raise ValueError("\x1b]0;title\x07")
    except ValueError as error:
        ranks.record_failure(f"ValueError: {error}", error)
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert "\x1b" not in told["message"] + told["extraInfo"]["py_callstack"]
    assert told["message"] == "ValueError: \\x1b]0;title\\x07"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "out of memory; "),
        (MemoryError("Unable to allocate 7.45 GiB for an array"), "out of memory (7.45 GiB were requested); "),
        (RuntimeError("std::bad_alloc"), "out of memory; "),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."),
            "out of memory (4 b",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"), "out of memory of the GPU (2.00 GiB"),
        (OSError(12, "Cannot allocate memory"), "out of memory; "),
        (RuntimeError("the shapes differ"), "RuntimeError: the shapes differ (--traceback shows where)"),
    ],
)
def test_used_up_memory_is_said_in_words_with_what_helps(error, told):
    line = describe(error)
    assert line.startswith(told)
    assert "\n" not in line
    assert ("smaller batches" in line) == ("out of memory" in told)
    assert "--traceback shows where" in line


def test_a_run_that_diverged_is_said_with_flags_and_the_way_out(capsys):
    def diverged(_):
        raise Diverged("updates were skipped; lower `warmup_updates`")

    assert run("ftk-train", diverged, []) == 1
    assert capsys.readouterr().err == "ftk-train: updates were skipped; lower --warmup-updates\n"


def test_a_kernel_that_is_not_built_is_said_with_what_builds_it(capsys):
    def body(_: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'ftk.tokenizers._texts'", name="ftk.tokenizers._texts")

    assert run("ftk-preprocess", body, []) == 1
    told = capsys.readouterr().err
    assert "_texts.pyx is not built: install ftk (pip install -e .)" in told


def test_a_process_of_several_that_failed_stays_deaf_to_torchruns_signal_until_it_is_gone():
    code = """
import os, signal, sys
from ftk.errors import UserError
from ftk_cli.command import describe, run
def body(arguments):
    raise UserError("refused")
code = run("ftk-train", body)
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(code)
"""
    environment = os.environ | {"RANK": "1", "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (2, "ftk-train: refused\n")


def test_of_a_long_message_the_beginning_and_the_end_are_shown():
    """Such as that of torch's compiler, which holds the output of the C++ compiler."""
    whole = "CppCompileError: C++ compile error\n\nCommand:\n" + "g++ -O3 " * 200 + "\nOutput:\nno space left on device"
    line = describe(RuntimeError(whole))
    assert line.startswith("RuntimeError: CppCompileError: C++ compile error Command: g++")
    assert line.endswith(" Output: no space left on device (--traceback shows where)")
    assert "\n" not in line
    assert len(line) < 700


CODE = """
import atexit, os, signal
from ftk_cli.command import run

def again():
    os.kill(os.getpid(), signal.SIGINT)

def body(argv):
    atexit.register(again)
    raise KeyboardInterrupt

raise SystemExit(run("ftk-data", body))
"""


def test_ctrl_c_while_an_interrupted_command_ends_shows_no_traceback():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "ftk-data: interrupted\n")


def test_what_the_terminals_encoding_lacks_is_written_as_an_escape_of_json():
    code = "from ftk_cli.command import run; run('ftk-data', lambda argv: print('\\u4e2d \\U00020bb7'), [])"
    environment = {**os.environ, "PYTHONIOENCODING": "gbk"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (done.stdout.decode("gbk").strip(), done.stderr) == ("中 \\ud842\\udfb7", b"")
