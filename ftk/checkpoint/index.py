"""The form of a folder of tensors: an index, and the safetensors files that it describes.

index.json                          shape, dtype and chunks of every tensor, and entries of the caller
tensors_00000_of_00001.safetensors  one file per rank; a chunk of a tensor has the key NAME@OFFSETS
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ftk.checkpoint.layout import BrokenCheckpoint, read_part
from ftk.files import read_json
from ftk.models.renames import LazyTensors

INDEX = "index.json"

FORMAT = "ftk-tensors"
VERSION = 1
_MAX_DIMS = 64  # as torch has it
DTYPE_CODES = {  # torch dtype -> its code in a safetensors header
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODES}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A box of a tensor in a file."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of the folder: its whole shape, its dtype and its chunks (none for an empty tensor)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True)
class TensorIndex:
    """The content of `index.json`."""

    tensors: dict[str, StoredTensor]
    extra: dict[str, Any]

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of tied tensors -> the name they are stored under."""
        return self.extra.get("aliases", {})

    @property
    def names(self) -> dict[str, str]:
        """Every name of a tensor -> the name it is stored under."""
        return {name: name for name in self.tensors} | self.aliases


def read_index(folder: Path) -> TensorIndex:
    """Read `index.json` of a folder that `write_tensors` wrote.

    Raises:
        BrokenCheckpoint: it is missing or invalid; the chunks of a tensor do not cover each of its elements once; a
            file is smaller than the tensors listed in it.
    """
    path = folder / INDEX
    content = read_part(path, read_json)
    try:
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(f"format {content['format']!r:.40} {content['version']!r:.40}, not {FORMAT} {VERSION}")
        tensors = {name: _stored_tensor(name, entry) for name, entry in content["tensors"].items()}
        index = TensorIndex(tensors, dict(content["extra"]))
        for alias, name in index.aliases.items():
            if not isinstance(name, str) or name not in tensors or alias in tensors:
                raise ValueError(f"{alias!r:.200} is no other name of a tensor")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise BrokenCheckpoint(f"{path}: is not the index of a tensor folder ({what})") from error
    needed = dict.fromkeys((chunk.file for stored in tensors.values() for chunk in stored.chunks), 0)
    for stored in tensors.values():
        for chunk in stored.chunks:
            needed[chunk.file] += math.prod(chunk.shape) * stored.dtype.itemsize
    for name, size in needed.items():
        there = read_part(folder / name, lambda file: file.stat().st_size)
        if there < size:
            raise BrokenCheckpoint(f"{path}: puts {size} bytes of tensors in {name}, which has {there}")
    return index


def safetensors_header(
    entries: list[tuple[str, torch.Size, torch.dtype]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a safetensors file with these tensors: length and JSON, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, shape, dtype in entries:
        if dtype not in DTYPE_CODES:
            raise TypeError(f"{key} has dtype {dtype}, which a safetensors file does not hold")
        end = offset + shape.numel() * dtype.itemsize
        header[key] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def safetensors_pieces(tensors: LazyTensors, metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file, with one tensor in memory at a time.

    Larger elements go first, then names, as in safetensors itself: so each tensor starts at a multiple of its element
    size.
    """
    described = tensors.described
    order = sorted(described, key=lambda name: (-described[name].dtype.itemsize, name))
    yield safetensors_header([(name, described[name].shape, described[name].dtype) for name in order], metadata)
    for name in order:
        yield tensor_bytes(tensors.read(name))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor in row-major order; a contiguous tensor on the CPU is not copied."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _stored_tensor(name: str, entry: dict[str, Any]) -> StoredTensor:
    """Raises what `read_index` catches."""
    shape = _sizes(entry["shape"])
    chunks = []
    for chunk in entry["chunks"]:
        file, key = chunk["file"], chunk["key"]
        if not isinstance(file, str) or not isinstance(key, str) or Path(file).name != file or "\0" in file:
            raise ValueError(f"file {file!r:.100} is outside the folder")
        chunks.append(Chunk(file, key, _sizes(chunk["offset"]), _sizes(chunk["shape"])))
    if any(len(part) != len(shape) for chunk in chunks for part in (chunk.offset, chunk.shape)) or not (
        _fill(chunks, (0,) * len(shape), shape) if math.prod(shape) else not chunks
    ):
        raise ValueError(f"the chunks of tensor {name!r:.200} do not fill its shape {list(shape)}, each element once")
    return StoredTensor(shape, _DTYPE_NAMES[entry["dtype"]], tuple(chunks))


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise ValueError(f"{values!r:.100} are not sizes")
    if len(values) > _MAX_DIMS or math.prod(values) >= 1 << 63:
        raise ValueError(f"{values!r:.100} are too large")
    return tuple(values)


def _fill(chunks: list[Chunk], offset: tuple[int, ...], shape: tuple[int, ...], depth: int = 0) -> bool:
    """Whether chunks cover each element of a box once.

    True if one chunk is the box, or if straight cuts divide the box and the chunks into boxes that are so covered; all
    shards have this form, for any number of meshes and dimensions. Sorting suffices to check it.
    """
    if len(chunks) == 1:
        return chunks[0].offset == offset and chunks[0].shape == shape
    for dim in range(len(shape) if depth < _MAX_DIMS else 0):
        at = offset[dim]
        parts: list[tuple[int, list[Chunk]]] = []
        for chunk in sorted(chunks, key=lambda chunk: chunk.offset[dim]):
            start, end = chunk.offset[dim], chunk.offset[dim] + chunk.shape[dim]
            if not parts or start >= at:
                if start != at or end == start:
                    return False  # a gap, or an empty chunk
                parts.append((start, []))
            parts[-1][1].append(chunk)
            at = max(at, end)
        if at != offset[dim] + shape[dim]:
            return False
        if len(parts) > 1:
            ends = [start for start, _ in parts[1:]] + [at]
            return all(
                _fill(
                    part,
                    (*offset[:dim], start, *offset[dim + 1 :]),
                    (*shape[:dim], end - start, *shape[dim + 1 :]),
                    depth + 1,
                )
                for (start, part), end in zip(parts, ends, strict=True)
            )
    return False
