"""Types of the compiled module _ngrams.pyx."""

import numpy as np
import numpy.typing as npt

def repeating_tokens(rows: npt.NDArray[np.int64], size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
