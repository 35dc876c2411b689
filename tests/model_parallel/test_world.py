"""The sizes of the mesh, and what processes tell each other."""

from __future__ import annotations

import datetime
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.model_parallel import rendezvous, world
from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.rendezvous import ProcessHangs, wait_for_all
from ftk.model_parallel.world import (
    DIMENSIONS,
    Sizes,
    World,
    launched_processes,
    make_world,
    open_world,
    refuse_shared_gpus,
    resolve_sizes,
)
from tests.distributed import run_ranks
from tests.torchrun import torchrun


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
            "^`tensor_parallel_size` 2 needs 2 processes, but there is one; use torchrun --nproc-per-node 2 ",
        ),
        ({"tensor_parallel_size": 3}, 4, "`tensor_parallel_size` 3 does not divide the number of processes, 4"),
        (
            {"data_parallel_shard_size": 2, "data_parallel_replicate_size": 3},
            4,
            "= 6 is not the number of processes, 4",
        ),
        (
            {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 1},
            2,
            "2 processes were started.*`tensor_parallel_size` and `pipeline_parallel_size`",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_numbers(options, world_size, message):
    with pytest.raises(UserError, match=message):
        resolve_sizes(ParallelConfig(**options), world_size)


def test_a_command_alone_is_told_how_to_start_it(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ftk-generate", "--path", "run"])
    with pytest.raises(UserError, match="add `launch` 2$"):
        resolve_sizes(ParallelConfig(pipeline_parallel_size=2), 1)


def test_sizes_are_told_to_people():
    assert Sizes().describe() == "1 process"
    assert Sizes(tensor=2, shard=3).describe() == "6 processes: tensor parallel 2, sharded data parallel 3"
    halves = ParallelConfig(
        tensor_parallel_size=2,
        sequence_parallel=True,
        pipeline_parallel_size=2,
        pipeline_layers=[3, 1],
        data_parallel_shard_size=2,
    )
    whole = "16 processes: tensor parallel 2 (sequence parallel), pipeline parallel 2 (1f1b, layers 3,1), "
    whole += "sharded data parallel 2 (zero stage 1), replicated data parallel 2"
    assert Sizes(2, 2, 2, 2).describe(halves) == whole
    offloaded = ParallelConfig(data_parallel_shard_size=2, zero_stage=2, cpu_offload=True)
    expected = "2 processes: sharded data parallel 2 (zero stage 2), cpu offload"
    assert Sizes(shard=2).describe(offloaded) == expected
    half = ParallelConfig(weights="bf16", cpu_offload=True)
    assert Sizes().describe(half) == "1 process: cpu offload, weights in bf16"
    compressed = ParallelConfig(gradient_compression="bf16")
    expected = "2 processes: replicated data parallel 2 (gradient compression bf16)"
    assert Sizes(replicate=2).describe(compressed) == expected
    assert Sizes(2, 4).describe() == "8 processes: pipeline parallel 2, replicated data parallel 4"


def test_options_refuse_what_makes_no_sense():
    assert mistakes(ParallelConfig()) == []
    assert "must be at least 1" in mistakes(ParallelConfig(tensor_parallel_size=0))[0]
    for minutes in (0.0, -1.0, float("nan"), float("inf")):
        assert "collective_timeout_minutes is" in mistakes(ParallelConfig(collective_timeout_minutes=minutes))[0]


def test_a_process_alone_has_no_group_and_talks_to_itself():
    with open_world(ParallelConfig(), torch.device("cpu")) as world:
        assert launched_processes() is None
        assert (world.rank, world.size, world.mesh, world.group("tensor")) == (0, 1, None, None)
        assert all((world.is_main, world.is_last_stage, world.counts_loss))
        assert world.sum_host([1, 2.5]) == [1, 2.5]
        assert world.gather_json({"a": 1}) == [{"a": 1}]
        assert not torch.distributed.is_initialized()


def talk() -> dict:
    called = []
    new_group = dist.new_group

    def counted(ranks=None, **options):
        called.append(ranks)
        return new_group(ranks, **options)

    dist.new_group = counted
    copies = make_world(Sizes(replicate=4), "cpu").mesh["replicate", "shard"]
    assert called == [[dist.get_rank()]]  # the four copies are the default group
    assert (copies.size(0), copies.size(1), copies.get_local_rank("shard")) == (4, 1, 0)
    world = make_world(Sizes(pipeline=2, replicate=1, shard=1, tensor=2), "cpu", timeout_seconds=77.0)
    rank = world.rank
    world.barrier()
    apart = world.with_own_host_group()
    groups = [*map(world.group, DIMENSIONS), apart.own_host_group]
    return {
        "seconds": [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups],
        "members": [torch.distributed.get_process_group_ranks(group) for group in groups],
        "apart": apart.sum_host([rank]),
        "places": [world.pipeline_rank, world.data_rank, world.tensor_rank],
        "counts": world.counts_loss,
        "sum": world.sum_host([rank, 2**53 if rank == 0 else 0]),
        "max": world.max_host([rank, -rank]),
        "gathered": world.gather_json({"名": "x" * rank}),
        "broadcast": world.broadcast_json(f"from {rank}"),
    }


def test_four_processes_know_their_places_and_tell_each_other():
    results = run_ranks(talk, 4)
    assert [result["places"] for result in results] == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    assert [result["counts"] for result in results] == [False, False, True, False]
    for rank, result in enumerate(results):
        pipeline, tensor = sorted([rank, (rank + 2) % 4]), [rank // 2 * 2, rank // 2 * 2 + 1]
        assert result["members"] == [pipeline, [rank], [rank], tensor, [0, 1, 2, 3]]
        assert result["seconds"] == [77.0] * 5
        assert result["apart"] == [6]
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


def test_two_threads_need_two_host_groups():
    single = World.single()
    assert single.with_own_host_group().own_host_group is None
    shared = World(0, Sizes(replicate=2), torch.device("cpu"), mesh=object())
    with pytest.raises(AssertionError, match="with_own_host_group"):
        _ = shared.own_host_group


# -- GPUs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch see so many GPUs, and returns which one this process takes."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def take(count, local_rank, name="cuda"):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        own = world._own_device(torch.device(name), world_size=2)
        assert chosen[-1:] == [own]
        return own

    return take


def test_each_process_takes_the_gpu_of_its_number_or_the_only_one_that_it_sees(gpus):
    assert gpus(8, 3) == torch.device("cuda", 3)
    assert gpus(1, 0) == torch.device("cuda", 0)
    assert gpus(1, 3) == torch.device("cuda", 0)  # as Slurm's --gpus-per-task shows them


@pytest.mark.parametrize(("name", "expected"), [("cuda:1", "cuda:1"), ("cuda", "cuda:0"), ("cpu", None)])
def test_a_process_by_itself_takes_its_gpu(monkeypatch, name, expected):
    """Kernels that are not told their device run there, too."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    monkeypatch.delenv("RANK", raising=False)
    with world.open_world(ParallelConfig(), torch.device(name)) as own:
        assert str(own.device) == (expected or name)
    assert chosen == ([expected] if expected else [])


def test_gpus_that_do_not_go_with_the_processes_are_refused(gpus):
    with pytest.raises(UserError, match="process 2 of this machine finds 2 GPUs.*--nproc-per-node 2"):
        gpus(2, 2)
    with pytest.raises(UserError, match="`device` cuda:3 is one GPU, but 2 processes were started; with `device` cuda"):
        gpus(8, 0, "cuda:3")
    refuse_shared_gpus(["a", "b", "c"])
    with pytest.raises(UserError, match="processes 1 and 3 have the same GPU"):
        refuse_shared_gpus(["a", "b", "c", "b"])


# -- finding each other, and missing each other --------------------------------------------------------------

RESTARTED = """
import os, sys, time
from pathlib import Path

import torch

from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.world import open_world

mark = Path(sys.argv[1])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":  # dies before it has come to where the other one waits
        while not mark.exists():
            time.sleep(0.02)
        time.sleep(1.0)
        os._exit(7)
    mark.touch()
try:
    with open_world(ParallelConfig(), torch.device("cpu")) as world:
        world.barrier()
        own, other = (mark.parent / f"{number} is through" for number in (world.rank, 1 - world.rank))
        own.touch()
        while not other.exists():  # who leaves ends the barrier of who is still in it
            time.sleep(0.02)
        raise ValueError("ill")
except ValueError:
    assert not torch.distributed.is_initialized()  # and another world can be opened
for number in range(2):
    with open_world(ParallelConfig(), torch.device("cpu")) as world:
        assert world.sum_host([1.0]) == [2.0]
        (mark.parent / f"{number} on {world.rank}").touch()
"""


@pytest.mark.slow
def test_a_restart_after_a_process_died_before_it_met_the_others(tmp_path):
    (tmp_path / "restarted.py").write_text(RESTARTED)
    done = torchrun(2, tmp_path / "restarted.py", tmp_path / "mark", timeout=120, options=("--max-restarts", "1"))
    assert done.returncode == 0, done.stderr
    assert "exitcode: 7" in done.stderr
    for number in range(2):
        for rank in range(2):
            assert (tmp_path / f"{number} on {rank}").exists()


def meet_and_hang() -> list[str]:
    """The common name of three processes, and the messages of two of them when they wait for the third one."""
    rank, rendezvous.ANSWER_SECONDS = dist.get_rank(), 3.0
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=False)
    for other in range(3):  # what an attempt before has left
        store.set(f"ftk_asks_{other}", f"left by {other}")
    dist.barrier()
    time.sleep(0.1 * rank)
    name = wait_for_all(store, rank, 3, 60.0)
    group = dist.new_group(timeout=datetime.timedelta(seconds=1.0 + rank / 2))  # the second one waits longer
    try:
        with rendezvous.name_missing_ranks(dist.PrefixStore(name, store), rank, 3, 3.0, "; give it longer"):
            if rank != 2:
                dist.barrier(group=group)
    except ProcessHangs as error:
        return [name, str(error)]
    return [name, "nothing"]


def test_processes_meet_and_name_the_one_that_hangs(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("STORE_PORT", str(server.port))
    results = run_ranks(meet_and_hang, 3)
    assert len({name for name, _ in results}) == 1
    hung = "timed out after 3 seconds; process 2 hangs or has lost the connection; give"
    assert [said[: len(hung)] for _, said in results] == [hung, hung, "nothing"]


def fail(store, rank, error):
    with rendezvous.name_missing_ranks(store, rank, 3, 600.0, ""):
        raise error


def test_who_has_failed_otherwise_is_not_said_to_hang(monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.2)
    store = dist.HashStore()
    in_vain = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete")
    with pytest.raises(ValueError, match="ill"):
        fail(store, 1, ValueError("ill"))
    with pytest.raises(ProcessHangs, match="timed out after 10 minutes; process 2 hangs") as raised:
        fail(store, 0, in_vain)
    assert raised.value.__cause__ is in_vain
    with pytest.raises(
        ProcessHangs, match="as did all other processes: they wait for each other in different collectives"
    ):
        fail(store, 2, in_vain)


def test_a_store_that_does_not_answer_is_said(monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.1)

    class Lost:
        def append(self, *words):
            raise dist.DistNetworkError("connection reset")

    with pytest.raises(ProcessHangs, match="the machine at MASTER_ADDR, where the processes connect, does not answer"):
        fail(Lost(), 0, dist.DistStoreError("wait timeout after 600000ms, keys: 0/1"))


@pytest.mark.parametrize(("device", "expected"), [("cuda:0", torch.device("cuda", 0)), ("cpu", None)])
def test_nccl_is_told_its_device(monkeypatch, device, expected):
    class Connected(Exception):
        pass

    def connect(backend, *, device_id, **about):
        assert (device_id, "nccl" in backend) == (expected, expected is not None)
        raise Connected

    monkeypatch.setattr(world, "_own_device", lambda device, world_size: device)
    monkeypatch.setattr(dist, "init_process_group", connect)
    with pytest.raises(Connected), open_world(ParallelConfig(cpu_offload=True), torch.device(device)):
        pass


def test_who_does_not_come_is_named():
    store = dist.HashStore()
    with pytest.raises(ProcessHangs, match="timed out after 0.06 seconds; processes 1, 2 hang or have"):
        wait_for_all(store, 0, 3, 0.06)
    with pytest.raises(ProcessHangs, match="process 0 hangs or has lost the connection"):
        wait_for_all(store, 2, 3, 0.06)
