import numpy as np
from numpy.typing import NDArray

def blend_corpora(shares: NDArray[np.float64], count: int) -> NDArray[np.uint16]: ...
