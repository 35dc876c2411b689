"""Named tensors in a folder: safetensors files and a JSON index, written and read through PyTorch's DCP.

DCP plans which rank writes and reads which part of each tensor, so shards load into any other sharding. This module
replaces its file format, which uses pickle. (torch's `HuggingFaceStorageWriter` is no alternative: it does not fsync,
stores at most one chunk of a tensor per file, and has no index of shards.)

    index.json                          shape, dtype and chunks of every tensor, and entries of the caller
    tensors_00000_of_00001.safetensors  one file per rank; a chunk of a tensor has the key NAME@OFFSETS
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.futures import Future

from ftk.checkpoint.layout import BrokenCheckpoint, read_part
from ftk.checkpoint.manifest import FileRecord, json_bytes, write_file
from ftk.files import open_regular, read_json, reason
from ftk.model_parallel.shards import fused_of, own_pieces

INDEX = "index.json"

_FORMAT = "ftk-tensors"
_VERSION = 1
_MAX_DIMS = 64  # as torch has it
_DTYPE_CODES = {  # torch dtype -> its code in a safetensors header
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
DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPE_CODES}


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
        aliases: dict[str, str] = self.extra.get("aliases", {})
        return aliases

    @property
    def names(self) -> dict[str, str]:
        """Every name of a tensor -> the name it is stored under."""
        return {name: name for name in self.tensors} | self.aliases


def write_tensors(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    extra: Mapping[str, Any] | None = None,
    read: Callable[[str], torch.Tensor] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, FileRecord]:
    """Write tensors into a folder; every file has reached the disk on return.

    Args:
        folder: created if it is missing.
        tensors: by name; DTensors are written by the ranks that hold their shards, others once.
        extra: JSON values, stored in the index.
        read: returns each tensor when it is written; then `tensors` are on the meta device.
        process_group: ranks that all call this, and each write their shards; None: this process alone.

    Returns:
        The records of the files, by name within `folder` (complete on the first rank of the group).

    Raises:
        OSError: the disk is full or the like.
    """
    tensors = {name: _as_boxes(tensor) for name, tensor in tensors.items()}
    writer = _TensorWriter(folder, dict(extra or {}), read)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if process_group is None:
        _save_alone(tensors, writer, planner)
    else:
        with _own_errors():
            dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=process_group)
    return writer.files


def read_tensors(folder: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill `targets` in place from a folder that `write_tensors` wrote; each rank reads for itself.

    Args:
        folder: the folder.
        targets: by name, of the stored shapes, in any dtype and on any device; a DTensor takes its shards.

    Raises:
        BrokenCheckpoint: the index is damaged, does not fit the files, or has no tensor of a target's name and shape;
            before any target changes.
    """
    index = read_index(folder)
    for name, target in targets.items():
        if name not in index.tensors or index.tensors[name].shape != tuple(target.shape):
            raise BrokenCheckpoint(f"{folder / INDEX}: has no tensor {name!r} of shape {list(target.shape)}")
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    boxes = {name: _as_boxes(target) for name, target in targets.items()}
    with _own_errors(), warnings.catch_warnings():  # the filter is global: use this with no other thread running
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(boxes, storage_reader=_TensorReader(folder, index), planner=planner, no_dist=True)


def read_index(folder: Path) -> TensorIndex:
    """Read `index.json` of a folder that `write_tensors` wrote.

    Raises:
        BrokenCheckpoint: it is missing or invalid; the chunks of a tensor do not cover each of its elements once; a
            file is smaller than the tensors listed in it.
    """
    path = folder / INDEX
    content = read_part(path, read_json)
    try:
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            raise ValueError(f"format {content['format']!r:.40} {content['version']!r:.40}, not {_FORMAT} {_VERSION}")
        tensors = {name: _stored_tensor(name, entry) for name, entry in content["tensors"].items()}
        index = TensorIndex(tensors, dict(content["extra"]))
        _check_aliases(index)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BrokenCheckpoint(f"{path}: is not the index of a tensor folder ({_words(error)})") from error
    needed = dict.fromkeys((chunk.file for stored in tensors.values() for chunk in stored.chunks), 0)
    for stored in tensors.values():
        for chunk in stored.chunks:
            needed[chunk.file] += math.prod(chunk.shape) * stored.dtype.itemsize
    for name, size in needed.items():
        there = read_part(folder / name, lambda file: file.stat().st_size)
        if there < size:
            raise BrokenCheckpoint(f"{path}: puts {size} bytes of tensors in {name}, which has {there}")
    return index


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
                if (header.get_dtype(), header.get_shape()) != (_DTYPE_CODES[stored.dtype], list(chunk.shape)):
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
        raise BrokenCheckpoint(f"{path}: {reason(error) if isinstance(error, OSError) else error}") from error


def _as_boxes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for DCP: of fused layers a rank has several boxes of the whole parameter."""
    if fused_of(tensor) is None or not isinstance(tensor, DTensor):
        return tensor
    part, pieces = tensor.to_local().detach(), own_pieces(tensor)
    if not pieces or not part.numel():
        return tensor
    boxes = LocalShardsWrapper(
        [part[here] for here, _ in pieces], [tuple(place.start for place in there) for _, there in pieces]
    )
    return DTensor(boxes, tensor._spec, requires_grad=False)


def _save_alone(tensors: Mapping[str, torch.Tensor], writer: _TensorWriter, planner: DefaultSavePlanner) -> None:
    """The steps of `dcp.save` for one process.

    `dcp.save` warns about a single process, and muting warnings is not safe here: checkpoints are written in a thread.
    """
    planner.set_up_planner(dict(tensors), None, True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


class _TensorWriter(StorageWriter):
    """DCP's side of `write_tensors`; one object per rank."""

    def __init__(self, folder: Path, extra: dict[str, Any], read: Callable[[str], torch.Tensor] | None = None) -> None:
        self.folder = folder
        self.extra = extra
        self.read = read
        self.files: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.files = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(f"{item.index.fqn} is no tensor; only tensors can be stored")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = [f"tensors_{rank:05d}_of_{len(plans):05d}.safetensors" for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        pending = []  # (key, chunk shape, dtype, item); empty chunks are not stored
        for item in plan.items:
            assert item.tensor_data is not None
            chunk, whole = item.tensor_data.chunk, item.tensor_data.size
            if chunk.sizes.numel():
                is_whole = chunk.sizes == whole
                key = item.index.fqn if is_whole else f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"
                pending.append((key, chunk.sizes, item.tensor_data.properties.dtype, item))
        # Larger elements first, so that every tensor starts at a multiple of its element size.
        pending.sort(key=lambda entry: (-entry[2].itemsize, entry[0]))

        def pieces() -> Iterator[memoryview | bytes]:
            yield safetensors_header([(key, shape, dtype) for key, shape, dtype, _ in pending])
            for key, shape, dtype, item in pending:
                tensor = planner.resolve_data(item) if self.read is None else self.read(key)
                assert isinstance(tensor, torch.Tensor), key
                assert (tensor.shape, tensor.dtype) == (shape, dtype), key
                yield tensor_bytes(tensor)

        results: list[WriteResult] = []
        if pending:
            file: str = plan.storage_data
            record = write_file(self.folder / file, pieces())
            for key, shape, dtype, item in pending:
                assert item.index.offset is not None
                place = Chunk(file, key, tuple(item.index.offset), tuple(shape))
                size = shape.numel() * dtype.itemsize
                results.append(WriteResult(item.index, size, storage_data=(place, record)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for of_rank in results for result in of_rank):
            place, record = result.storage_data
            chunks[result.index.fqn].append(place)
            self.files[place.file] = record
        tensors = {}
        for name in sorted(chunks):
            stored = metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            tensors[name] = {
                "shape": list(stored.size),
                "dtype": str(stored.properties.dtype).removeprefix("torch."),
                "chunks": [dataclasses.asdict(chunk) for chunk in chunks[name]],
            }
        content = {"format": _FORMAT, "version": _VERSION, "extra": self.extra, "tensors": tensors}
        self.files[INDEX] = write_file(self.folder / INDEX, [json_bytes(content)])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # used only as an object handed to DCP, never chosen by name


class _TensorReader(StorageReader):
    """DCP's side of `read_tensors`; one object per rank."""

    def __init__(self, folder: Path, index: TensorIndex) -> None:
        self.folder = folder
        self.index = index
        self.chunks = {
            MetadataIndex(name, chunk.offset): chunk
            for name, stored in index.tensors.items()
            for chunk in stored.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        stored = {}
        for name, tensor in self.index.tensors.items():
            boxes = [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape)) for c in tensor.chunks]
            stored[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), boxes)
        return Metadata(state_dict_metadata=dict(stored))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        check_headers(self.folder, self.index, {self.chunks[item.storage_index].file for item in plan.items})
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Chunk, Any]]] = {}
        for item in plan.items:
            chunk = self.chunks[item.storage_index]
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for name, reads in by_file.items():
            with open_safetensors(self.folder / name) as file:
                for chunk, item in reads:
                    source = file.get_tensor(chunk.key)
                    for dim, start in enumerate(item.storage_offsets):
                        source = source.narrow(dim, start, item.lengths[dim])
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(source)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # used only as an object handed to DCP, never chosen by name


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the original error that DCP wraps."""
    try:
        yield
    except CheckpointException as error:
        if not error.failures:
            raise
        cause, _ = error.failures[min(error.failures)]
        raise cause from None


def safetensors_header(
    entries: list[tuple[str, torch.Size, torch.dtype]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a safetensors file with these tensors: length and JSON, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, shape, dtype in entries:
        if dtype not in _DTYPE_CODES:
            raise TypeError(f"{key} has dtype {dtype}, which a safetensors file does not hold")
        end = offset + shape.numel() * dtype.itemsize
        header[key] = {"dtype": _DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


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


def _check_aliases(index: TensorIndex) -> None:
    for alias, name in index.aliases.items():
        if not isinstance(name, str) or name not in index.tensors or alias in index.tensors:
            raise ValueError(f"{alias!r:.200} is no other name of a tensor")


def _words(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
