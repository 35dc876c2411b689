"""Files as fairseq-preprocess writes them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from ftk.data.indexed.format import FAIRSEQ_DTYPES

CODES = {np.dtype(dtype).name: code for code, dtype in FAIRSEQ_DTYPES.items()}


def fairseq_index(sequences: list[list[int]], code: int, itemsize: int) -> bytes:
    """The .idx file of sequences."""
    sizes = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, code, len(sequences))
    return index + sizes.tobytes() + pointers.astype("<i8").tobytes()


def write_fairseq(prefix: Path, sequences: list[list[int]], dtype: str = "uint16") -> None:
    """Writes the pair PREFIX.bin, PREFIX.idx; makes the folder."""
    prefix.parent.mkdir(exist_ok=True)
    index = fairseq_index(sequences, CODES[dtype], np.dtype(dtype).itemsize)
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(row, dtype=dtype).tobytes() for row in sequences))
