from typing import Any

import numpy as np
from numpy.typing import NDArray

def hide(
    tokens: NDArray[np.int64],
    lengths: NDArray[np.int64],
    seed: int,
    epoch: int,
    indices: Any,
    share: float,
    most: int,
    rounded: bool,
    kind: NDArray[np.uint8],
    unchanged: float,
    replaced: float,
    mask: int,
    others: NDArray[np.int64],
) -> NDArray[np.bool_]: ...
