from typing import Any

import numpy as np
from numpy.typing import NDArray

def corrupt(
    texts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    hidden: NDArray[np.int64],
    spans: NDArray[np.int64],
    seed: int,
    epoch: int,
    indices: Any,
    sentinels: NDArray[np.int64],
    end: int,
    pad: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
