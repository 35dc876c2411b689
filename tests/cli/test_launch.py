"""ftk lists its commands, and `--launch N` starts processes: ranks, failures, signals, the end of the parent."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftk_cli import launch
from ftk_cli.__main__ import COMMANDS, main
from tests.paths import ROOT
from tests.processes import wait_until


def run(tmp_path, program, number=2):
    """What `run_processes` returns for a program of Python."""
    (tmp_path / "program.py").write_text("import os, pathlib, signal, sys, time\n" + program)
    return launch.run_processes("ftk-x", [sys.executable, str(tmp_path / "program.py"), str(tmp_path)], number)


def test_each_process_knows_its_rank_and_all_know_the_same_world(tmp_path):
    program = (
        "e = os.environ\n"
        "names = ('WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')\n"
        "assert e['RANK'] == e['LOCAL_RANK']\n"
        "assert pathlib.Path(e['TORCHELASTIC_ERROR_FILE']).parent.is_dir()\n"
        "pathlib.Path(sys.argv[1], 'rank' + e['RANK']).write_text(' '.join(e[n] for n in names))"
    )
    assert run(tmp_path, program, number=3) == 0
    [world] = {(tmp_path / f"rank{rank}").read_text() for rank in range(3)}
    assert world.startswith("3 3 127.0.0.1 ")


@pytest.mark.parametrize(
    ("fails", "code", "said"),
    [("sys.exit(2)", 2, ""), ("os.kill(os.getpid(), 9)", 1, "ftk-x: process 1 was ended by SIGKILL\n")],
)
def test_the_first_failure_ends_all(tmp_path, capsys, fails, code, said):
    assert run(tmp_path, f"{fails} if os.environ['RANK'] == '1' else time.sleep(600)") == code
    assert capsys.readouterr().err == said


def test_a_process_that_ignores_the_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.1)
    program = (
        "ready = pathlib.Path(sys.argv[1], 'ready')\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    ready.touch()\n"
        "    time.sleep(600)\n"
        "while not ready.exists(): time.sleep(0.01)\n"
        "sys.exit(3)"
    )
    assert run(tmp_path, program) == 3


def test_a_failure_after_a_signal_ends_all(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SETTLE_SECONDS", 0.1)
    program = (
        "ready = pathlib.Path(sys.argv[1], 'ready')\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGINT, lambda *_: os._exit(3))\n"
        "    ready.touch()\n"
        "    time.sleep(600)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "while not ready.exists(): time.sleep(0.01)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(600)"
    )
    assert run(tmp_path, program) == 3


def test_a_signal_while_processes_start_reaches_the_later_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SETTLE_SECONDS", 600)
    start = launch._start

    def signal_and_start(*given):
        os.kill(os.getpid(), signal.SIGUSR1)
        return start(*given)

    monkeypatch.setattr(launch, "_start", signal_and_start)
    assert run(tmp_path, "time.sleep(600)") == 1


def test_a_module_in_the_working_folder_is_not_run(tmp_path):
    (tmp_path / "torch.py").write_text("import sys; sys.exit('the wrong torch')")
    look = "import sys; sys.path.remove(''); from ftk_cli.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", look, "validate", "nodata", "--path", "norun", "--launch", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2, done.stderr
    assert "norun" in done.stderr
    assert "the wrong torch" not in done.stderr


WAITING = (
    "def end(signum, frame):\n"
    "    time.sleep(0.2 * int(os.environ['RANK']))\n"
    "    pathlib.Path(sys.argv[1], f'{os.getpid()}.ended').touch()\n"
    "    os._exit(1)\n"
    "signal.signal(signal.SIGTERM, end)\n"
    "signal.signal(signal.SIGINT, end)\n"
    "pathlib.Path(sys.argv[1], f'{os.getpid()}.ready').touch()\n"
    "time.sleep(600)"
)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 1), (signal.SIGKILL, -9)], ids=str)
def test_a_signal_is_passed_on_once_and_no_process_outlives_its_parent(tmp_path, signum, code):
    (tmp_path / "program.py").write_text("import os, pathlib, signal, sys, time\n" + WAITING)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import sys; from ftk_cli.launch import *; sys.exit(run_processes('x', {command}, 2))"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == 2, parent)
    parent.send_signal(signum)
    assert parent.wait(60) == code
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.ended"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["data", "--launch", "4", "--lr", "1"], (4, ["data", "--lr", "1"])),
        (["--launch=2"], (2, [])),
        (["--launch", "2", "data", "--launch=3"], (3, ["data"])),
        (["--launch", "2", "--launch", "x"], (None, [])),
        (["--launch"], (None, [])),
        (["--launch", "x"], (None, [])),
        (["--lr", "2"], (None, ["--lr", "2"])),
    ],
)
def test_the_flag_is_taken_out(argv, found):
    assert launch._split(argv) == found


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "data", "--arch", "glm_tiny", "--max-update", "1", "--launch", "0"], "ftk-train: --launch is 0; it"),
        (["train", "data", "--arch", "glm_tiny", "--launch", "9999"], "ftk-train: --launch is 9999; it must be"),
        (["trian"], "ftk: unknown command 'trian'; did you mean 'train'?"),
        (["eval-lm"], "ftk: unknown command 'eval-lm'; in ftk: ftk evaluate --evaluation perplexity"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_file_that_asks_for_processes_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "own.yaml").write_text("command: {launch: 4}\n")
    flags = ["--config", str(tmp_path / "own.yaml"), "--arch", "glm_tiny", "--max-update", "1"]
    assert main(["train", "data", *flags]) == 2
    assert "command.launch is 4" in capsys.readouterr().err


def test_a_traceback_is_asked_for_before_or_behind_the_command(capsys):
    for argv in (["--traceback", "data", "show", "nodata"], ["data", "--traceback", "show", "nodata"]):
        assert main(argv) == 2
        assert "Traceback" in capsys.readouterr().err
    assert main(["--traceback", "trian"]) == 2
    assert "ftk: unknown command 'trian'" in capsys.readouterr().err


def test_torchrun_and_launch_are_not_mixed(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "data", "--launch", "2"]) == 2
    assert "--launch starts the processes itself; give it without torchrun" in capsys.readouterr().err


def test_ftk_lists_every_command_without_torch():
    scripts = re.findall(r'^(ftk\S*) = "ftk_cli', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert ["ftk", *sorted(f"ftk-{name}" for name in COMMANDS)] == sorted(scripts)
    for name in COMMANDS:
        source = importlib.import_module(f"ftk_cli.{name.replace('-', '_')}").__file__
        assert Path(source).read_text().endswith('\n\nif __name__ == "__main__":\n    raise SystemExit(main())\n')
    look = "import sys, ftk_cli.__main__ as ftk; code = ftk.main([]); assert 'torch' not in sys.modules; sys.exit(code)"
    for argv in ([sys.executable, "-c", look], [sys.executable, "-m", "ftk_cli", "--help"]):
        done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == (2 if "-c" in argv else 0), done.stderr
        assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.slow
def test_sizes_that_do_not_fit_end_in_one_line(tmp_path):
    frozen = Path(__file__).parents[1] / "frozen" / "data-bin"
    flags = ["--arch", "glm_tiny", "--max-update", "1", "--seq-length", "32", "--save-dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "ftk_cli", "train", str(frozen), *flags, "--device", "cpu", "--launch", "2"]
    done = subprocess.run([*command, "--tensor-parallel-size", "3"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--tensor-parallel-size 3" in done.stderr
    assert done.stderr.count("\n") == 1
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stderr
