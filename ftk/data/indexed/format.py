"""The layout of `.bin/.idx` pairs: ours (which is Megatron's) and fairseq's, distinguished by their sizes.

`.bin` holds the tokens of all sequences back to back, little endian, without a header. `.idx`:

    offset  size  content                                            Megatron and ftk   fairseq
         0     9  magic b"MMIDIDX\\0\\0"                              yes                yes
         9     8  version, uint64, 1                                 yes                yes
        17     1  code of the token dtype, uint8                     yes                yes
        18     8  S, number of sequences, uint64                     yes                yes
        26     8  D, length of the document index, uint64            yes                no
             4*S  length of each sequence in tokens, int32           yes                yes
             8*S  offset of each sequence in the .bin, bytes, int64  yes                yes
             8*D  document index: sequence counts, from 0, int64     yes                no
               S  mode of each sequence, int8                        only multimodal    no

Sources: NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py, facebookresearch/fairseq
fairseq/data/indexed_dataset.py (MMapIndexedDataset).
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftk.errors import UserError
from ftk.files import open_regular

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
SIZES_AT = 34  # bytes of Megatron's header; fairseq's ends before the document count
FAIRSEQ_SIZES_AT = 26

# fairseq wrote 6 for float64 and read 7 as float64, too; in Megatron 7 is float32, and 9 and 10 do not exist.
MEGATRON_DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
FAIRSEQ_DTYPES = MEGATRON_DTYPES | {7: np.dtype("<f8"), 9: np.dtype("<u4"), 10: np.dtype("<u8")}


@dataclass(frozen=True)
class IndexLayout:
    """Where the arrays of one .idx file lie.

    Attributes:
        dialect: "megatron" (also ours) or "fairseq".
        dtype: dtype of the tokens in the .bin file.
        num_sequences, num_marks: lengths of the per-sequence arrays and of the document index (fairseq: 0).
        sizes_at, pointers_at, marks_at: byte offsets of lengths, pointers and document index.
    """

    dialect: str
    dtype: np.dtype[Any]
    num_sequences: int
    num_marks: int
    sizes_at: int

    @property
    def pointers_at(self) -> int:
        return self.sizes_at + 4 * self.num_sequences

    @property
    def marks_at(self) -> int:
        return self.pointers_at + 8 * self.num_sequences


def dtype_code(dtype: np.dtype[Any]) -> int:
    """The code of `dtype` in an .idx file that we write.

    Raises:
        UserError: there is none.
    """
    for code, known in MEGATRON_DTYPES.items():
        if known == dtype:
            return code
    names = ", ".join(known.name for known in MEGATRON_DTYPES.values())
    raise UserError(f"an indexed dataset cannot hold {dtype.name}; choose one of {names}")


def pack_header(dtype: np.dtype[Any], num_sequences: int, num_marks: int) -> bytes:
    """The bytes of an .idx file before the lengths, `SIZES_AT` of them."""
    return MAGIC + struct.pack("<QBQQ", VERSION, dtype_code(dtype), num_sequences, num_marks)


def file_size(path: Path) -> int:
    """Bytes of a regular file; a missing file or a folder is a `UserError`."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path}: no such file; an indexed dataset is a pair NAME.bin, NAME.idx (made by ftk-preprocess) "
            "and is opened by its prefix, without .bin or .idx"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: not a regular file")
    return status.st_size


def read_layout(path: Path) -> IndexLayout:
    """Reads the header of an .idx file and compares it with the size of the file.

    Args:
        path: the .idx file.

    Returns:
        where its arrays lie.

    Raises:
        UserError: the file is missing, is something else, or its size contradicts its header.
    """
    size = file_size(path)
    with open_regular(path) as file:
        header = file.read(SIZES_AT)
    if header[:8] == b"TNTIDX\x00\x00":
        raise UserError(f"{path}: fairseq's older format; make it again with `dataset_impl` mmap")
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        found = header[: len(MAGIC)]
        raise UserError(f"{path}: not the index of an indexed dataset (starts with {found!r}, not {MAGIC!r})")
    if size < FAIRSEQ_SIZES_AT:
        raise UserError(f"{path}: {size} bytes, shorter than the header; it is truncated, make it again")
    version, code, num_sequences = struct.unpack_from("<QBQ", header, len(MAGIC))
    if version != VERSION:
        raise UserError(f"{path}: version {version} of the format; only version 1 is known")
    num_marks = struct.unpack_from("<Q", header, 26)[0] if size >= SIZES_AT else 0

    megatron_size = SIZES_AT + 12 * num_sequences + 8 * num_marks
    fairseq_size = FAIRSEQ_SIZES_AT + 12 * num_sequences
    if size == fairseq_size:
        dialect, sizes_at, num_marks, dtypes = "fairseq", FAIRSEQ_SIZES_AT, 0, FAIRSEQ_DTYPES
    elif size >= SIZES_AT and size in (megatron_size, megatron_size + num_sequences):
        dialect, sizes_at, dtypes = "megatron", SIZES_AT, MEGATRON_DTYPES
    else:
        raise UserError(
            f"{path}: {size} bytes, but its header announces {num_sequences} sequences and {num_marks} "
            f"document marks, which take {megatron_size} bytes ({fairseq_size} in fairseq's layout); "
            "it is truncated or altered, make it again"
        )
    if code not in dtypes:
        known = ", ".join(f"{key} {value.name}" for key, value in dtypes.items())
        raise UserError(f"{path}: dtype code {code} does not exist (known: {known}); make the file again")
    if dialect == "megatron" and num_marks == 0:
        raise UserError(f"{path}: the document index is empty (it must start with 0); make the file again")
    return IndexLayout(dialect, dtypes[code], num_sequences, num_marks, sizes_at)
