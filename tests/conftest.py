"""What all tests share: where the real text is, and a way to run commands as a user does."""

from __future__ import annotations

import functools
import gc
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.paths import ROOT, TEST_DATA, corpus_lines
from tests.processes import leave_out_fsync, run_command

# For this process, before it imports PyTorch, and for those that tests start.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums do not depend on the machine
# Without AMX: there are virtual machines that show it and end a process that uses it (SIGILL at a product in bf16).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
leave_out_fsync()
# A shell that starts the tests in the background, and nohup, have these ignored, which programs that tests start would
# inherit: Ctrl-C and a closed terminal would reach none of them.
for signum, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(signum) == signal.SIG_IGN:
        signal.signal(signum, handler)
settings.register_profile("ftk", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no test is timed
settings.load_profile("ftk")


gc.disable()  # while tests are imported and collected, of which nothing is garbage: a quarter of that time


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: tests that call for a garbage collection would wait for its walk."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real text and hostile inputs ($FTK_TEST_DATA, default ../shared); skips where there is none."""
    if not TEST_DATA.is_dir():
        pytest.skip(f"needs the test data; {TEST_DATA} is missing (set FTK_TEST_DATA)")
    return TEST_DATA


@pytest.fixture(scope="session", autouse=True)
def entry_points_once() -> Iterator[None]:
    """This process looks once for plugins in installed packages: it takes 4 ms, and each command does it."""
    from ftk import plugins  # imports PyTorch, which must find the environment set

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_entry_points", functools.cache(plugins._entry_points))
        yield


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `command("ftk-train", "--help")` in a process of its own."""
    return run_command


@pytest.fixture
def here(capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """here(main, *arguments, stdin=bytes, code=exit code that it must have) runs a command in this process.

    Returns:
        Exit code, standard output and standard error.
    """

    def run(
        main: Callable[[list[str]], int], *arguments: object, stdin: bytes = b"", code: int | None = None
    ) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        found = main([*map(str, arguments)])
        out, err = capsys.readouterr()
        assert code in (None, found), f"{main.__module__} ended with code {found}:\n{out}{err}"
        return found, out, err

    return run


@pytest.fixture(scope="session")
def data_bin(tmp_path_factory, command) -> Path:
    """A small preprocessed corpus: English sentences, SentencePiece with 600 pieces."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = corpus_lines()
    (folder / "train.txt").write_text("\n".join(lines[16:]), encoding="utf-8")
    (folder / "valid.txt").write_text("\n".join(lines[:16]), encoding="utf-8")
    texts = ("--trainpref", folder / "train.txt", "--validpref", folder / "valid.txt")
    options = ("--vocab-size", 600, "--special-tokens", "glm", "--destdir", folder / "data-bin")
    command("ftk-preprocess", *texts, *options, code=0)
    return folder / "data-bin"


@pytest.fixture(scope="session")
def short_data_bin(data_bin, command) -> Path:
    """The same with an eighth of the text for training: whole epochs in few updates."""
    folder = data_bin.parent
    (folder / "short.txt").write_text("\n".join(corpus_lines()[16:520]), encoding="utf-8")
    texts = ("--trainpref", folder / "short.txt", "--validpref", folder / "valid.txt")
    options = ("--tokenizer-path", data_bin / "tokenizer", "--destdir", folder / "short-data-bin")
    command("ftk-preprocess", *texts, *options, code=0)
    return folder / "short-data-bin"


@pytest.fixture(scope="session")
def made_place(tmp_path_factory) -> Path:
    """See `place`."""
    from tests.small_run import make_place  # imports PyTorch, which must find the environment set

    folder = tmp_path_factory.mktemp("place")
    make_place(folder)
    return folder


@pytest.fixture(scope="module")
def place(made_place, tmp_path_factory) -> Path:
    """A folder with text, data-bin/, other-bin/ (another tokenizer) and run/ (a small checkpoint), one per module."""
    return Path(shutil.copytree(made_place, tmp_path_factory.mktemp("generate"), dirs_exist_ok=True))
