"""Types of the compiled module _index.pyx."""

from typing import Any

import numpy as np
import numpy.typing as npt

class SequenceTable:
    count: int
    def __init__(
        self, index: Any, tokens: npt.NDArray[Any], count: int, sizes_at: int, pointers_at: int
    ) -> None: ...
    def find_fault(self) -> tuple[str, int, int, int] | None: ...
    def get(self, index: int, offset: int = 0, length: int = -1) -> npt.NDArray[Any]: ...

def find_document_fault(index: Any, at: int, count: int, sequences: int) -> tuple[int, int, int] | None: ...
def flatten(
    rows: list[list[int]], dtype: npt.DTypeLike
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]: ...
