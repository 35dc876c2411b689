"""The sizes of the mesh, and what processes tell each other."""

from __future__ import annotations

import pytest
import torch

from ftk.errors import UserError
from ftk.model_parallel.parallel_config import ParallelConfig
from ftk.model_parallel.world import Sizes, World, launched_by_torchrun, make_world, open_world, resolve_sizes
from tests.distributed import run_ranks


@pytest.mark.parametrize(
    ("options", "world_size", "sizes"),
    [
        ({}, 1, (1, 1, 1, 1)),
        ({}, 4, (1, 4, 1, 1)),
        ({"tensor_parallel_size": 2}, 8, (1, 4, 1, 2)),
        ({"data_parallel_shard_size": 4}, 8, (1, 2, 4, 1)),
        ({"data_parallel_replicate_size": 2}, 8, (1, 2, 4, 1)),
        ({"data_parallel_replicate_size": 1, "tensor_parallel_size": 2}, 8, (1, 1, 4, 2)),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel_shard_size": 2}, 8, (2, 1, 2, 2)),
    ],
)
def test_sizes_that_are_missing_are_derived(options, world_size, sizes):
    assert resolve_sizes(ParallelConfig(**options), world_size) == Sizes(*sizes)


@pytest.mark.parametrize(
    ("options", "world_size", "message"),
    [
        (
            {"tensor_parallel_size": 2},
            1,
            "size 2 does not divide the number of processes, 1; use torchrun --nproc-per-node 2",
        ),
        ({"tensor_parallel_size": 3}, 4, "--tensor-parallel-size 3 does not divide the number of processes, 4"),
        (
            {"data_parallel_shard_size": 2, "data_parallel_replicate_size": 3},
            4,
            "= 6 is not the number of processes, 4",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_numbers(options, world_size, message):
    with pytest.raises(UserError, match=message):
        resolve_sizes(ParallelConfig(**options), world_size)


def test_processes_without_a_size_for_them_are_refused():
    alone = ParallelConfig(data_parallel_shard_size=1, data_parallel_replicate_size=1)
    with pytest.raises(
        UserError, match="2 processes were started.*--tensor-parallel-size and --pipeline-parallel-size"
    ):
        resolve_sizes(alone, 2)


def test_options_refuse_what_makes_no_sense():
    assert list(ParallelConfig().validate()) == []
    assert "must be 1 or more" in next(ParallelConfig(tensor_parallel_size=0).validate())
    assert "--tensor-parallel-size" in next(ParallelConfig(sequence_parallel=True).validate())


def test_a_process_alone_has_no_group_and_talks_to_itself():
    with open_world(ParallelConfig(), torch.device("cpu")) as world:
        assert not launched_by_torchrun({})
        assert (world.rank, world.size, world.mesh, world.group("tensor")) == (0, 1, None, None)
        assert all((world.is_main, world.is_first_stage, world.is_last_stage, world.counts_loss))
        assert world.sum_host([1, 2.5]) == [1, 2.5]
        assert world.gather_json({"a": 1}) == [{"a": 1}]
        assert not torch.distributed.is_initialized()


def talk() -> dict:
    world = make_world(Sizes(pipeline=2, replicate=1, shard=1, tensor=2), "cpu")
    rank = world.rank
    world.barrier()
    return {
        "places": [world.pipeline_rank, world.data_rank, world.tensor_rank],
        "counts": world.counts_loss,
        "group": torch.distributed.get_process_group_ranks(world.group("tensor")),
        "sum": world.sum_host([rank, 2**53 if rank == 0 else 0]),
        "max": world.max_host([rank, -rank]),
        "gathered": world.gather_json({"名": "x" * rank}),
        "broadcast": world.broadcast_json(f"from {rank}"),
    }


def test_four_processes_know_their_places_and_tell_each_other():
    results = run_ranks(talk, 4)
    assert [result["places"] for result in results] == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    assert [result["counts"] for result in results] == [False, False, True, False]
    assert [result["group"] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for result in results:
        assert result["sum"] == [6, 2**53]
        assert result["max"] == [3, 0]
        assert result["gathered"] == [{"名": "x" * rank} for rank in range(4)]
        assert result["broadcast"] == "from 0"


def fail_on_rank_one() -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("this rank is the one")
    torch.distributed.barrier()


def test_the_first_failing_rank_is_shown():
    with pytest.raises(AssertionError, match="rank 1 failed(.|\n)*this rank is the one"):
        run_ranks(fail_on_rank_one, 2)


def test_a_world_of_one():
    assert World.single().sizes.world == 1
