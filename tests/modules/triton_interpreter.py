"""Kernels of Triton without a GPU: Triton interprets all of a process's kernels, or none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(name: str) -> None:
    """The tests of a file beside this one, in a process of their own."""
    file = str(Path(__file__).with_name(name))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", file],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def mend_interpreter() -> None:
    """For Triton 3.6, whose way to make an int of a tensor fails with NumPy 2.4."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
