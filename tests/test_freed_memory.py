"""Freed memory stays with the process or goes back, as it was asked for."""

from __future__ import annotations

import platform
import sys

import pytest

from ftk import freed_memory

CODE = """
import torch
from ftk.freed_memory import keep_freed_memory, return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

assert {policy}()
before = resident()
blocks = [torch.ones(2**20) for _ in range(50)]  # 4 MB each
assert resident() - before > 190e6
del blocks
print(resident() - before)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


@glibc
def test_freed_memory_is_kept_or_given_back(command):
    kept, returned = (
        int(command("-c", CODE.format(policy=policy)).stdout) for policy in ("keep_freed_memory", "return_freed_memory")
    )
    assert kept > 190e6
    assert returned < 20e6


def test_another_system_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: pytest.fail("there is no glibc to call"))
    assert not freed_memory.keep_freed_memory()
    assert not freed_memory.return_freed_memory()


@glibc
def test_small_blocks_are_kept_up_to_twice_the_given_size(command):
    # Without torch, whose import frees blocks of other sizes from time to time: glibc goes by the largest one.
    changes = {
        "import torch\n": "",
        "import keep_freed_memory, return_freed_memory": "import keep_freed_blocks",
        "assert {policy}()\n": "{call}\n",
        "torch.ones(2**20)": "b'x' * 2**20",
        "190e6": "47e6",
    }
    code = CODE
    for before, after in changes.items():
        assert before in code
        code = code.replace(before, after)
    returned, kept = (int(command("-c", code.format(call=call)).stdout) for call in ("", "keep_freed_blocks(31 << 20)"))
    assert returned < 20e6
    assert 40e6 < kept < 65e6
