"""Types of the compiled module _hash_set.pyx."""

import numpy as np
import numpy.typing as npt

class HashSet:
    def __len__(self) -> int: ...
    def add(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]: ...
