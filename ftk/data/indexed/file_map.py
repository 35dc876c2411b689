"""Read-only memory maps: a file that becomes shorter raises an error instead of ending the process."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import numpy as np

from ftk.data.indexed._file_maps import guard, is_lost, release
from ftk.files import FileState, open_regular, shortened, state_of


class FileMap(mmap.mmap):
    """A regular file as memory.

    Reads behind the end of a file that has become shorter give zeros; `check`, to be called before they are used,
    raises then.

    Args:
        path: the file; it is not empty.

    Attributes:
        path: as given.
        state: of the file when it was opened.

    Raises:
        OSError: as of `files.open_regular`.
    """

    path: str
    state: FileState
    _number: int

    def __new__(cls, path: str | os.PathLike[str]) -> FileMap:
        with open_regular(path) as file:
            state = state_of(file.fileno())
            self = super().__new__(cls, file.fileno(), state[2], access=mmap.ACCESS_READ)
        self.path, self.state = os.fspath(path), state
        self._number = guard(self)
        weakref.finalize(self, release, self._number).atexit = False
        return self

    def check(self) -> None:
        """Raises OSError if the file has become shorter."""
        size = self.size()
        if size < len(self) or is_lost(self._number):
            raise shortened(self.path, min(size, len(self)), len(self))


def check_files(*sources: Any) -> None:
    """Raises OSError if a file that documents, samples or an array come from has become shorter.

    Args:
        sources: each a `FileMap`, an array over one, or an object with a method `check_files`; others are not checked.
    """
    for source in sources:
        if isinstance(source, FileMap):
            source.check()
        elif isinstance(source, np.ndarray):
            check_files(source.base)
        elif isinstance(source, memoryview):
            check_files(source.obj)
        elif (check := getattr(source, "check_files", None)) is not None:
            check()
