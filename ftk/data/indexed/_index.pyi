"""Types of the compiled module _index.pyx."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Fault = tuple[str, int, int, int]

class SequenceTable:
    def __init__(self, index: Any, tokens: npt.NDArray[Any], count: int, sizes_at: int, pointers_at: int) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> npt.NDArray[Any]: ...
    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]: ...
    def gather(
        self,
        indices: Sequence[int] | npt.NDArray[Any],
        *,
        pad: int | float = 0,
        length: int | None = None,
        dtype: npt.DTypeLike | None = None,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]: ...
    def gather_packed(
        self,
        indices: Sequence[int] | npt.NDArray[Any],
        *,
        dtype: npt.DTypeLike | None = None,
        out: npt.NDArray[Any] | None = None,
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]: ...
    def check(self) -> None: ...
    def accept(self) -> None: ...
    @property
    def accepted(self) -> bool: ...
    def find_fault(self, first: int, stop: int, expected: int) -> tuple[Fault | None, int]: ...

def flatten(rows: list[list[int]], dtype: npt.DTypeLike) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]: ...
