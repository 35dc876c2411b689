"""The device that these tests run on: the GPU; they are skipped where there is none.

`FTK_GPU_TEST_DEVICE=cpu` runs them on the CPU, all but those that need CUDA itself, to try the tests themselves.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "benchmark"))


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def interrupted_when_time_is_over():
    """SIGTERM, as `timeout` sends it, ends the tests as Ctrl-C does: what failed until then is printed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def device() -> torch.device:
    chosen = os.environ.get("FTK_GPU_TEST_DEVICE", "cuda")
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU; this PyTorch finds none")
    return torch.device(chosen)


@pytest.fixture(scope="session")
def cuda(device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs CUDA itself")
    return device
