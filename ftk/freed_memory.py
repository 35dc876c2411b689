"""Memory that the allocator keeps for its next use."""

from __future__ import annotations

import numpy as np


def keep_freed_memory(num_bytes: int = 31 << 20) -> None:
    """Has the allocator keep freed memory, up to twice as many bytes from now on, instead of returning it at once.

    glibc maps large blocks apart, and returns what is free at the end of a heap: work that takes the same few MB in
    each step then gets them from the system each time, page by page. Both limits follow the largest block apart that
    was freed, up to 32 MiB. With other allocators nothing changes.
    """
    np.empty(num_bytes, dtype=np.uint8)
