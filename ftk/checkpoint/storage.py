"""Named tensors in a folder: safetensors files and a JSON index, written through PyTorch's DCP.

DCP plans which rank writes which part of each tensor; `ftk.checkpoint.reading` reads them into any other sharding. This
module replaces its file format, which uses pickle, by `ftk.checkpoint.index`. (torch's `HuggingFaceStorageWriter` is no
alternative: it does not fsync, stores at most one chunk of a tensor per file, and has no index of shards.)
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.futures import Future

from ftk.checkpoint.index import FORMAT, INDEX, VERSION, Chunk, safetensors_header, tensor_bytes
from ftk.checkpoint.manifest import FileRecord, json_bytes, write_file
from ftk.model_parallel.shards import fused_of, local_pieces


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


def _as_boxes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for DCP: of fused layers a rank has several boxes of the whole parameter."""
    if fused_of(tensor) is None or not isinstance(tensor, DTensor):
        return tensor
    part, pieces = tensor.to_local().detach(), local_pieces(tensor)
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
        content = {"format": FORMAT, "version": VERSION, "extra": self.extra, "tensors": tensors}
        self.files[INDEX] = write_file(self.folder / INDEX, [json_bytes(content)])

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
