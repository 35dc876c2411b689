from typing import Any

import numpy as np
from numpy.typing import NDArray

class RingReader:
    total: int
    def __init__(
        self, documents: Any, cumulative: NDArray[np.int64], vocab_size: int, prefix: Any, end: int
    ) -> None: ...
    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], pad: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
