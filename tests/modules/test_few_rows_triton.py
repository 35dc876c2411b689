"""The kernels of Triton for a step give what the operators of the layer give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftk.modules.attention import HAS_TRITON


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton, which comes with torch for CUDA")
def test_interpreted_kernels():
    """In a process of its own: Triton interprets all of a process's kernels, or none."""
    file = Path(__file__).with_name("interpreted_few_rows_triton.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
