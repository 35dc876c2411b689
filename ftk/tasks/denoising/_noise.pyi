from typing import Any

import numpy as np
from numpy.typing import NDArray

def corrupt(
    texts: NDArray[np.int64],
    text_lengths: NDArray[np.int64],
    seed: int,
    epoch: int,
    indices: Any,
    kind: NDArray[np.uint8],
    ends: NDArray[np.uint8],
    permuted: float,
    share: float,
    lengths: NDArray[np.float64],
    replace_length: int,
    random_share: float,
    inserted: float,
    rotated: float,
    mask: int,
    others: NDArray[np.int64],
    pad: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
