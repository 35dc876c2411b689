"""Weights that several processes wrote become one file; the bytes that are held meanwhile are counted."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Shard, distribute_tensor

from ftk.checkpoint import load_model_tensors
from ftk.checkpoint.export import stream_safetensors
from ftk.checkpoint.save import write_snapshot
from ftk.checkpoint.snapshot import take_snapshot
from ftk.model_parallel.world import Sizes, make_world
from tests.distributed import run_ranks
from tests.held import Held
from tests.records import assert_same_tensors

NUM_TENSORS, ROWS, COLUMNS = 8, 64, 256
TENSOR_BYTES = ROWS * COLUMNS * 4


def save_in_parts(folder: str) -> None:
    """Each of two processes has one half of the rows."""
    world = make_world(Sizes(tensor=2), "cpu")
    assert world.mesh is not None
    generator = torch.Generator().manual_seed(3)
    wholes = {f"layers.{place}": torch.rand(ROWS, COLUMNS, generator=generator) for place in range(NUM_TENSORS)}
    tensors = {name: distribute_tensor(value, world.mesh["tensor"], [Shard(0)]) for name, value in wholes.items()}
    snapshot = take_snapshot(model=tensors, trainer_state={}, config={}, world=world)
    write_snapshot(Path(folder) / "checkpoint_1", snapshot, world=world.with_own_host_group())


def test_parts_are_merged_with_one_tensor_in_memory(tmp_path: Path) -> None:
    run_ranks(save_in_parts, 2, str(tmp_path))
    with Held() as everything:  # what is counted so, would be seen
        tensors = load_model_tensors(tmp_path / "checkpoint_1")
    assert everything.peak >= NUM_TENSORS * TENSOR_BYTES
    tracemalloc.start()
    try:
        with Held() as held:
            stream_safetensors(tmp_path / "checkpoint_1", tmp_path / "merged.safetensors")
        in_python = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert everything.copies == held.copies == 2 * NUM_TENSORS
    assert TENSOR_BYTES <= held.peak <= 2 * TENSOR_BYTES  # it, and the part that is copied into it
    assert in_python < NUM_TENSORS / 2 * TENSOR_BYTES + (1 << 20)  # a file is hashed by blocks of 1 MB
    merged = load_file(tmp_path / "merged.safetensors")
    assert_same_tensors(merged, tensors)
