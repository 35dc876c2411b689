"""Read the tensors of a folder that `ftk.checkpoint.storage` wrote: whole, or the part of each that a process has.

Without PyTorch's DCP, whose import takes longer than reading most models: each process finds the chunks that it needs
in the index.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ftk.checkpoint.index import DTYPE_CODES, INDEX, Chunk, StoredTensor, TensorIndex, read_index
from ftk.checkpoint.layout import BrokenCheckpoint
from ftk.files import open_regular, reason
from ftk.model_parallel.shards import local, local_pieces


@torch.no_grad()
def read_tensors(folder: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill `targets` in place from a folder that `write_tensors` wrote; each rank reads for itself.

    Args:
        targets: by name, of the stored shapes, in any dtype and on any device; a DTensor takes its shards.

    Raises:
        BrokenCheckpoint: the index is damaged, does not fit the files, or has no tensor of a target's name and shape;
            before any target changes.
    """
    index = read_index(folder)
    by_file: dict[str, list[tuple[str, tuple[slice, ...], torch.Tensor]]] = {}  # key, place in the chunk, where it goes
    for name, target in targets.items():
        if name not in index.tensors or index.tensors[name].shape != tuple(target.shape):
            raise BrokenCheckpoint(f"{folder / INDEX}: has no tensor {name!r} of shape {list(target.shape)}")
        part = local(target)
        for here, there in local_pieces(target):
            for chunk in index.tensors[name].chunks:
                common = _common(there, chunk)
                if common is not None:
                    in_piece, in_chunk = common
                    by_file.setdefault(chunk.file, []).append((chunk.key, in_chunk, part[here][in_piece]))
    check_headers(folder, index, by_file)
    for file_name, reads in by_file.items():
        with open_safetensors(folder / file_name) as file:
            for key, place, target in reads:
                target.copy_(file.get_tensor(key)[place])


def _common(piece: tuple[slice, ...], chunk: Chunk) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What a box of a tensor has in common with a stored one: its place in each of them; None if it is empty."""
    in_piece, in_chunk = [], []
    for wanted, offset, size in zip(piece, chunk.offset, chunk.shape, strict=True):
        start, stop = max(wanted.start, offset), min(wanted.stop, offset + size)
        if start >= stop:
            return None
        in_piece.append(slice(start - wanted.start, stop - wanted.start))
        in_chunk.append(slice(start - offset, stop - offset))
    return tuple(in_piece), tuple(in_chunk)


def check_headers(folder: Path, index: TensorIndex, files: Collection[str] | None = None) -> None:
    """Compare an index with the headers of the safetensors files.

    Args:
        folder: of the index.
        index: from `read_index`.
        files: of the folder; None: all of them.

    Raises:
        BrokenCheckpoint: a chunk is not in its file, or has another dtype or shape there.
    """
    by_file: dict[str, list[tuple[Chunk, StoredTensor]]] = {}
    for stored in index.tensors.values():
        for chunk in stored.chunks:
            if files is None or chunk.file in files:
                by_file.setdefault(chunk.file, []).append((chunk, stored))
    for name, chunks in by_file.items():
        with open_safetensors(folder / name) as file:
            for chunk, stored in chunks:
                header = file.get_slice(chunk.key)
                if (header.get_dtype(), header.get_shape()) != (DTYPE_CODES[stored.dtype], list(chunk.shape)):
                    raise BrokenCheckpoint(f"{folder / name}: {chunk.key} has another dtype or shape than in {INDEX}")


def stored_pieces(folder: Path, index: TensorIndex) -> Iterator[tuple[str, torch.Tensor]]:
    """The chunks of all tensors of a folder, each with the tensor's name.

    Raises:
        BrokenCheckpoint: as of `check_headers`.
    """
    check_headers(folder, index)
    for file_name in sorted({chunk.file for stored in index.tensors.values() for chunk in stored.chunks}):
        with open_safetensors(folder / file_name) as file:
            for name, stored in index.tensors.items():
                for chunk in stored.chunks:
                    if chunk.file == file_name:
                        yield name, file.get_tensor(chunk.key)


def read_whole(folder: Path, stored: StoredTensor) -> torch.Tensor:
    """A tensor of a folder, put together on the CPU.

    Raises:
        BrokenCheckpoint: a chunk is not in its file, or has another dtype or shape there.
    """
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    for chunk in stored.chunks:
        place = tuple(slice(start, start + size) for start, size in zip(chunk.offset, chunk.shape, strict=True))
        with open_safetensors(folder / chunk.file) as file:
            part = file.get_tensor(chunk.key)
        if (part.dtype, tuple(part.shape)) != (stored.dtype, chunk.shape):
            raise BrokenCheckpoint(f"{folder / chunk.file}: {chunk.key} has another dtype or shape than in {INDEX}")
        tensor[place] = part
    return tensor


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file of a checkpoint with `safe_open`.

    Raises:
        BrokenCheckpoint: it is no regular file, no safetensors file, or lacks a tensor that the block reads.
    """
    try:
        open_regular(path).close()  # safe_open would block on a pipe
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        what = reason(error) if isinstance(error, OSError) else str(error)
        again = ": it is not whole; copy it again" if "deserializing header" in what else ""
        raise BrokenCheckpoint(f"{path}: {what}{again}") from error
