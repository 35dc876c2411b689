"""Shards that several processes saved load into any other sharding; broken files are named."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ftk.checkpoint.index import read_index
from ftk.checkpoint.layout import BrokenCheckpoint
from ftk.checkpoint.reading import check_headers, read_tensors
from ftk.checkpoint.storage import write_tensors
from tests.distributed import run_ranks

FILE = "tensors_00000_of_00001.safetensors"


def save_or_load(folder: str, what: str) -> None:
    """Each rank saves or loads its share of the rows of `rows` (7, so unevenly), of the columns of `columns`, …"""
    world, group = dist.get_world_size(), dist.group.WORLD
    mesh = init_device_mesh("cpu", (world,))
    whole = {
        "rows": torch.arange(28.0).reshape(7, 4),
        "columns": torch.arange(24).reshape(4, 6),
        "few_rows": torch.tensor([[1.5, 2.5]]),
        "copied": torch.arange(5).to(torch.bfloat16),
        "plain": torch.tensor(3.25),
        "empty": torch.zeros(0, 2),
    }
    placements = {"rows": [Shard(0)], "columns": [Shard(1)], "few_rows": [Shard(0)], "copied": [Replicate()]}
    tensors = {
        name: distribute_tensor(value, mesh, placements[name]) if name in placements else value
        for name, value in whole.items()
    }
    if what == "save":
        files = write_tensors(Path(folder), tensors, extra={"note": 1}, process_group=group)
        assert (len(files) == world + 1) == (dist.get_rank() == 0), files
        return
    targets = {name: torch.zeros_like(value) for name, value in tensors.items()}
    read_tensors(Path(folder), targets)
    for name, target in targets.items():
        full = target.full_tensor() if name in placements else target
        assert torch.equal(full, whole[name]), (name, full)


def test_shards_of_two_ranks_load_into_one_process_and_into_three_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "tensors"
    folder.mkdir()
    run_ranks(save_or_load, 2, str(folder), "save")
    index = read_index(folder)
    assert index.extra == {"note": 1}
    assert [chunk.offset for chunk in index.tensors["rows"].chunks] == [(0, 0), (4, 0)]
    assert len(index.tensors["copied"].chunks) == 1
    assert index.tensors["empty"].chunks == ()
    assert len({chunk.file for chunk in index.tensors["rows"].chunks}) == 2

    targets = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in index.tensors.items()}
    read_tensors(folder, targets)
    assert torch.equal(targets["rows"], torch.arange(28.0).reshape(7, 4))
    assert torch.equal(targets["columns"], torch.arange(24).reshape(4, 6))
    assert torch.equal(targets["few_rows"], torch.tensor([[1.5, 2.5]]))
    assert torch.equal(targets["copied"], torch.arange(5).to(torch.bfloat16))
    assert targets["plain"] == 3.25
    run_ranks(save_or_load, 3, str(folder), "load")


def test_every_dtype_starts_at_a_multiple_of_its_size(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(3, dtype=torch.int8),
        "b": torch.ones(3, dtype=torch.float64),
        "c": torch.ones(1, dtype=torch.float16),
        "d": torch.ones(1, dtype=torch.bool),
        "e": torch.ones(5).to(torch.float8_e4m3fn),
        "f": torch.ones(1),
    }
    write_tensors(tmp_path, tensors)
    (file,) = tmp_path.glob("*.safetensors")
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    assert (8 + size) % 8 == 0
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        assert entry["data_offsets"][0] % tensors[name].element_size() == 0
    with safe_open(file, framework="pt") as opened:
        for name, tensor in tensors.items():
            assert torch.equal(opened.get_tensor(name).view(torch.uint8), tensor.view(torch.uint8))


def test_what_cannot_be_stored_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"z has dtype torch\.complex64"):
        write_tensors(tmp_path / "a", {"z": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(TypeError, match="x is no tensor"):
        write_tensors(tmp_path / "b", {"x": object()})  # type: ignore[dict-item]


def edit_index(folder: Path, edit) -> None:
    index = json.loads((folder / "index.json").read_text())
    edit(index)
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "edit",
    [
        lambda index: index.pop("tensors"),
        lambda index: index.update(format="other"),
        lambda index: index["tensors"]["w"].update(dtype="float99"),
        lambda index: index["tensors"]["w"]["chunks"][0].update(file="../elsewhere.safetensors"),
        lambda index: index["tensors"]["w"]["chunks"][0].update(file="absent.safetensors"),
        lambda index: index["tensors"]["w"]["chunks"][0].update(key="v"),
        lambda index: index["tensors"]["w"]["chunks"][0].update(shape=[1, 1]),
    ],
    ids=["no-tensors", "format", "dtype", "outside", "file", "key", "shape"],
)
def test_index_that_does_not_fit_is_a_broken_checkpoint(tmp_path: Path, edit) -> None:
    write_tensors(tmp_path, {"w": torch.ones(2, 2)})
    edit_index(tmp_path, edit)
    target = torch.zeros(2, 2)
    with pytest.raises(BrokenCheckpoint):
        read_tensors(tmp_path, {"w": target})
    assert not target.any()


def chunk(offset: list[Any], shape: list[Any], file: str = FILE, key: str = "w") -> dict[str, Any]:
    return {"file": file, "key": key, "offset": offset, "shape": shape}


DO_NOT_FILL = {
    "none": [],
    "beyond the end": [chunk([5, 0], [4, 6])],
    "before the start": [chunk([-4, 0], [4, 6])],
    "another rank": [chunk([0, 0, 0], [4, 6, 1])],
    "no rank": [chunk([], [])],
    "three times the same": [chunk([0, 0], [4, 6])] * 3,
    "a part twice": [chunk([0, 0], [2, 6])] * 2,
    "too small": [chunk([0, 0], [4, 5])],
    "too large": [chunk([0, 0], [4, 7])],
    "a gap": [chunk([0, 0], [1, 6]), chunk([2, 0], [2, 6])],
    "an overlap and a gap": [
        chunk([0, 0], [3, 3]),
        chunk([0, 3], [1, 3]),
        chunk([2, 3], [2, 3]),
        chunk([1, 0], [1, 3]),
    ],
    "an empty one between": [chunk([0, 0], [2, 6]), chunk([2, 0], [0, 6]), chunk([2, 0], [2, 6])],
    "a bool": [chunk([False, 0], [4, 6])],
    "a float": [chunk([0.0, 0], [4, 6])],
    "NaN": [chunk([math.nan, 0], [4, 6])],
    "a huge number": [chunk([10**300, 0], [4, 6])],
    "text": [chunk(["0", 0], [4, 6])],
    "no list": [{"file": FILE, "key": "w", "offset": "00", "shape": {"4": 6}}],
    "no object": ["w"],
}


@pytest.mark.parametrize("chunks", DO_NOT_FILL.values(), ids=[name.replace(" ", "-") for name in DO_NOT_FILL])
def test_chunks_that_do_not_fill_their_tensor_are_refused_before_any_read(tmp_path: Path, chunks: list[Any]) -> None:
    write_tensors(tmp_path, {"w": torch.ones(4, 6)})
    edit_index(tmp_path, lambda index: index["tensors"]["w"].update(chunks=chunks))
    with pytest.raises(BrokenCheckpoint, match=r"index.json: is not the index of a tensor folder"):
        read_index(tmp_path)


def tiled(shape: tuple[int, ...], cuts: list[list[int]]) -> list[dict[str, Any]]:
    """Chunks of a tensor that is cut along each dimension."""
    spans = [list(itertools.pairwise([0, *dim_cuts, size])) for dim_cuts, size in zip(cuts, shape, strict=True)]
    return [
        chunk([start for start, _ in box], [end - start for start, end in box], key=str(box))
        for box in itertools.product(*spans)
    ]


def test_chunks_cut_along_every_dimension_fill_their_tensor_and_one_less_does_not(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"w": torch.ones(40, 30, 20)})
    chunks = tiled((40, 30, 20), [list(range(1, 40)), [7, 8, 21], [5, 10]])
    random.Random(1).shuffle(chunks)
    for taken, whole in ((chunks, True), (chunks[1:], False), (chunks[1:] + chunks[-1:], False)):
        edit_index(tmp_path, lambda index, taken=taken: index["tensors"]["w"].update(chunks=taken))
        if whole:
            assert len(read_index(tmp_path).tensors["w"].chunks) == 480
        else:
            with pytest.raises(BrokenCheckpoint, match="do not fill its shape"):
                read_index(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.update(dtype="float16"), "has another dtype or shape than in index.json"),
        (lambda w: (w.update(shape=[6, 4]), w["chunks"][0].update(shape=[6, 4])), "has another dtype or shape"),
        (lambda w: (w.update(shape=[2**50, 2]), w["chunks"][0].update(shape=[2**50, 2])), "which has 168"),
        (lambda w: w.update(dtype="load"), "no 'load'"),
        (lambda w: w.update(dtype=["float32"]), "unhashable"),
    ],
    ids=["dtype", "shape", "larger than its file", "a function of torch", "a list"],
)
def test_index_that_says_otherwise_than_the_file_is_refused_before_memory_is_taken(tmp_path, edit, message) -> None:
    write_tensors(tmp_path, {"w": torch.ones(4, 6)})
    edit_index(tmp_path, lambda index: edit(index["tensors"]["w"]))
    with pytest.raises(BrokenCheckpoint, match=message):
        check_headers(tmp_path, read_index(tmp_path))


@pytest.mark.parametrize("edit", [lambda e: e.update(aliases={"v": "gone"}), lambda e: e.update(aliases=["w"])])
def test_other_name_of_no_tensor_is_refused(tmp_path: Path, edit) -> None:
    write_tensors(tmp_path, {"w": torch.ones(2)}, extra={"aliases": {"v": "w"}})
    assert read_index(tmp_path).aliases == {"v": "w"}
    edit_index(tmp_path, lambda index: edit(index["extra"]))
    with pytest.raises(BrokenCheckpoint, match=r"index\.json"):
        read_index(tmp_path)


@pytest.mark.parametrize("name", ["index.json", FILE])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_refused_without_waiting(tmp_path: Path, name: str, kind: str) -> None:
    write_tensors(tmp_path, {"w": torch.ones(2)})
    (tmp_path / name).unlink()
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(BrokenCheckpoint, match="which has 0|not a regular file"):
        read_tensors(tmp_path, {"w": torch.zeros(2)})
