"""The width of progress bars on terminals."""

from __future__ import annotations

import os
from typing import Any, TextIO

_WIDTH = 80  # columns, where a terminal reports none
_ROWS = 25


def bar_width(stream: TextIO) -> dict[str, Any]:
    """Options of a tqdm bar on `stream`: as wide as the terminal; with a reported size of 0 it would not be shown."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # no terminal
        columns = 0
    return {"dynamic_ncols": True} if columns else {"ncols": _WIDTH, "nrows": _ROWS}
