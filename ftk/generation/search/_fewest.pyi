"""Types of the compiled module _fewest.pyx."""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

def fewest(probabilities: Numbers, merits: Numbers, share: float) -> Numbers: ...
