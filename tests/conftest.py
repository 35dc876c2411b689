"""What all tests share: where the real text is, and a way to run commands as a user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _set_instructions() -> None:
    """Where a virtual machine names AMX and stops the programs that use it, oneDNN is told to do without."""
    cpuinfo = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not cpuinfo.exists() or "amx_tile" not in cpuinfo.read_text():
        return
    probe = "import torch; torch.nn.Linear(64, 128).bfloat16()(torch.ones(33, 64, dtype=torch.bfloat16))"
    stopped = subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == -signal.SIGILL
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16" if stopped else "ALL"


_set_instructions()  # before torch is imported; processes that tests start inherit it


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real text and hostile inputs ($FTK_TEST_DATA, default ../shared); skips where there is none."""
    folder = Path(os.environ.get("FTK_TEST_DATA", ROOT.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the test data; {folder} is missing (set FTK_TEST_DATA)")
    return folder


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `command("ftk-train", "--help")` in a process of its own."""

    def run(
        name: str, *arguments: object, cwd: Path | None = None, timeout: float = 300, **options: object
    ) -> subprocess.CompletedProcess[str]:
        module = f"ftk_cli.{name.removeprefix('ftk-').replace('-', '_')}"
        code = f"import sys; from {module} import main; sys.exit(main())"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=cwd,
            env=environment,
            text=True,
            timeout=timeout,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )  # type: ignore[call-overload]

    return run


@pytest.fixture(scope="session")
def data_bin(tmp_path_factory, command) -> Path:
    """A small preprocessed corpus: the docs' own sentences, SentencePiece with 400 pieces."""
    folder = tmp_path_factory.mktemp("corpus")
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    lines = [line for line in text.split("\n") if len(line) > 20 and line.isascii()]
    (folder / "train.txt").write_text("\n".join(lines[16:]), encoding="utf-8")
    (folder / "valid.txt").write_text("\n".join(lines[:16]), encoding="utf-8")
    done = command(
        "ftk-preprocess",
        "--trainpref",
        folder / "train.txt",
        "--validpref",
        folder / "valid.txt",
        "--tokenizer",
        "sentencepiece",
        "--vocab-size",
        600,
        "--destdir",
        folder / "data-bin",
    )
    assert done.returncode == 0, done.stderr
    return folder / "data-bin"
