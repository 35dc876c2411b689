import numpy as np
from numpy.typing import NDArray

from ftk.data.corpora.documents import Documents

class PairReader:
    def __init__(
        self,
        documents: Documents,
        cumulative: NDArray[np.int64],
        vocab_size: int,
        end: int,
        source_vocab_size: int,
        source_end: int,
    ) -> None: ...
    def source_sizes(self) -> NDArray[np.int32]: ...
    def read(
        self,
        numbers: NDArray[np.int64],
        source_sizes: NDArray[np.int32],
        source_prefix: NDArray[np.int64],
        target_prefix: NDArray[np.int64],
        source_lengths: NDArray[np.int64],
        target_lengths: NDArray[np.int64],
        pad: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
