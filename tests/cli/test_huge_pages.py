"""ftk-train's large tensors lie in huge pages where the system has them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CODE = """
from ftk_cli.train import ask_for_huge_pages
ask_for_huge_pages()
import torch
held = torch.zeros(2**25).fill_(1.0)  # 128 MB
print(open("/proc/self/smaps_rollup").read())
"""


def huge_kilobytes(**environment):
    inherited = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**inherited, **environment}, capture_output=True, text=True, check=True
    )
    return int(re.search(r"^AnonHugePages:\s*(\d+) kB", done.stdout, re.MULTILINE)[1])


@pytest.mark.skipif(
    not SYSTEM.exists() or "[madvise]" not in SYSTEM.read_text(), reason="needs Linux with huge pages on request"
)
def test_large_tensors_lie_in_huge_pages_unless_the_user_says_otherwise():
    assert huge_kilobytes() > 2**14  # of the 2 ** 17 asked for: the system may be short of them
    assert huge_kilobytes(THP_MEM_ALLOC_ENABLE="0") == 0
