"""Shards that several processes saved load into any other sharding; broken files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ftk.checkpoint.layout import BrokenCheckpoint
from ftk.checkpoint.storage import read_index, read_tensors, write_tensors
from tests.distributed import run_ranks


def save_or_load(folder: str, what: str) -> list[str]:
    """Each rank saves its share of the rows of `rows` (7, so unevenly), of the columns of `columns`, and so on.

    Returns:
        The files that a rank that loads asked for.
    """
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
        return []
    targets = {name: torch.zeros_like(value) for name, value in tensors.items()}
    asked: list[set[str]] = []
    read_tensors(Path(folder), targets, check=asked.append, process_group=group)
    for name, target in targets.items():
        full = target.full_tensor() if name in placements else target
        assert torch.equal(full, whole[name]), (name, full)
    return sorted(asked[0])


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
    assert any("tensors_00000" in file for files in run_ranks(save_or_load, 3, str(folder), "load") for file in files)


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
    index = json.loads((tmp_path / "index.json").read_text())
    edit(index)
    (tmp_path / "index.json").write_text(json.dumps(index))
    target = torch.zeros(2, 2)
    with pytest.raises(BrokenCheckpoint):
        read_tensors(tmp_path, {"w": target})
    assert not target.any()


def test_check_comes_before_any_target_changes(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"w": torch.ones(2)})
    target = torch.zeros(2)

    def refuse(files: set[str]) -> None:
        raise BrokenCheckpoint(f"refused {sorted(files)}")

    with pytest.raises(BrokenCheckpoint, match=r"refused .*tensors_00000_of_00001\.safetensors"):
        read_tensors(tmp_path, {"w": target}, check=refuse)
    assert not target.any()
