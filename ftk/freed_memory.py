"""What the allocator does with freed memory: kept for the next use, or returned to the system."""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_NEVER_TRIM = 2**31 - 1
_DEFAULT_MMAP_MAX = 65536


def keep_freed_memory() -> bool:
    """Let freed memory stay with the process.

    A step of training makes and drops hundreds of megabytes. By default blocks above 128 KiB to 32 MiB come fresh from
    the system and go back at once, and each page of them costs a fault when it is first touched: a step of 4 layers of
    512 in bf16 takes a fifth less time without (docs/performance.md).

    Returns:
        Whether that was possible: it is with glibc.
    """
    return _set_malloc({_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER_TRIM})


def return_freed_memory() -> bool:
    """Give freed blocks of 1 MiB and more back at once: the peak is what is in use, at the price of page faults.

    Returns:
        Whether that was possible: it is with glibc.
    """
    return _set_malloc({_MMAP_MAX: _DEFAULT_MMAP_MAX, _MMAP_THRESHOLD: 2**20, _TRIM_THRESHOLD: 2**18})


def keep_freed_blocks(num_bytes: int) -> None:
    """Let blocks of up to `num_bytes`, 32 MiB at most, stay with the process when they are freed, twice that in all.

    For work that takes the same few megabytes in each step. By default glibc goes by the largest block that was freed
    so far; this frees one. It changes nothing with other allocators, or where one of the functions above was called.
    """
    bytearray(num_bytes)


def _set_malloc(parameters: dict[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    done = [mallopt(parameter, value) for parameter, value in parameters.items()]
    return all(done)
