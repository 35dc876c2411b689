"""The processes of a run: the rank of this one, the mesh that they form, and small host-side collectives."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ftk.errors import UserError
from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.rendezvous import name_missing_ranks, wait_for_all
from ftk.model_parallel.same_start import Facts, check_same_start, environment_facts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("pipeline", "replicate", "shard", "tensor")
"""The dimensions of the mesh, outermost first: neighbouring ranks, which share a machine, communicate the most."""


GLOO_SECONDS = 0.1
"""Seconds that gloo's threads need to release their last tensors. They take the interpreter for it, and one that finds
it ending aborts the process (before Python 3.14). They cannot be waited for: models and meshes keep groups alive."""


class Sizes(NamedTuple):
    """How many processes there are along each dimension of the mesh."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """Processes that each take batches of their own."""
        return self.replicate * self.shard

    def describe(self, config: ParallelConfig | None = None) -> str:
        """For people: what the processes do, e.g. "4 processes: tensor parallel 2, sharded data parallel 2".

        Args:
            config: adds details, e.g. "pipeline parallel 2 (1f1b, layers 3,1)".
        """
        kinds = {
            "tensor parallel": self.tensor,
            "pipeline parallel": self.pipeline,
            "sharded data parallel": self.shard,
            "replicated data parallel": self.replicate,
        }
        ways = dict.fromkeys(kinds, "") if config is None else dict(zip(kinds, self._ways(config), strict=True))
        parts = [f"{kind} {size}{ways[kind]}" for kind, size in kinds.items() if size > 1]
        if config is not None and config.cpu_offload:
            parts.append("cpu offload")
        if config is not None and config.weights == "bf16":
            parts.append("weights in bf16")
        processes = f"{self.world} processes" if self.world > 1 else "1 process"
        return ": ".join([processes, *filter(None, [", ".join(parts)])])

    def _ways(self, config: ParallelConfig) -> Iterator[str]:
        """How each kind of parallelism is done, tensor first; empty where there is nothing to say."""
        yield " (sequence parallel)" if config.sequence_parallel else ""
        pipeline = [config.pipeline_schedule]
        if config.pipeline_layers:
            pipeline.append(f"layers {','.join(map(str, config.pipeline_layers))}")
        if config.pipeline_stages_per_rank is not None:
            pipeline.append(f"{config.pipeline_stages_per_rank} stages per process")
        yield f" ({', '.join(pipeline)})"
        yield f" (zero stage {1 if self.pipeline > 1 else config.zero_stage or 3})"  # as the pipeline does it
        compression = config.gradient_compression
        yield f" (gradient compression {compression})" if compression != "none" else ""


def resolve_sizes(config: ParallelConfig, world_size: int) -> Sizes:
    """The sizes of all dimensions, those that were not given derived from the number of processes.

    Raises:
        UserError: their product is not the number of processes, or cannot be.
    """
    tensor, pipeline = config.tensor_parallel_size, config.pipeline_parallel_size
    shard, replicate = config.data_parallel_shard_size, config.data_parallel_replicate_size
    given = [("`tensor_parallel_size`", tensor), ("`pipeline_parallel_size`", pipeline)]
    given += [("`data_parallel_shard_size`", shard)] if shard is not None else []
    given += [("`data_parallel_replicate_size`", replicate)] if replicate is not None else []
    product = 1
    for _, size in given:
        product *= size
    derived = shard is None or replicate is None
    if world_size % product if derived else world_size != product:
        large = [f"{flag} {size}" for flag, size in given if size > 1]
        if not large:
            flags = " and ".join(flag for flag, _ in given[:2])
            raise UserError(f"{world_size} processes were started, but no parallel size is given; give {flags}")
        text = " x ".join(large) + (f" = {product}" if len(large) > 1 else "")
        if world_size == 1:
            raise UserError(f"{text} needs {product} processes, but there is one; {_start_of(product)}")
        relation = "does not divide" if derived else "is not"
        raise UserError(f"{text} {relation} the number of processes, {world_size}; use other sizes")
    rest = world_size // product
    if shard is None:
        shard = 1 if replicate is None else rest
        rest = rest if replicate is None else 1
    return Sizes(pipeline, rest if replicate is None else replicate, shard, tensor)


def _start_of(num_processes: int) -> str:
    """How to start `num_processes` of this one, as far as it can be told from `sys.argv`."""
    is_command = os.path.basename(sys.argv[0]).startswith("ftk-")
    return f"add `launch` {num_processes}" if is_command else f"use torchrun --nproc-per-node {num_processes} ..."


@dataclass(frozen=True, eq=False)
class World:
    """This process among those of its run.

    A single process has no process group, unless an option needs FSDP2 (`ParallelConfig.needs_fsdp`).

    Attributes:
        rank: 0 to size - 1.
        device: of this process's tensors.
        mesh: over all processes, with the dimensions `DIMENSIONS`; None: there is no process group.
        host_group: for collectives on the host; None: the default group.
        timeout_seconds: how long a process waits for others before it fails.
        store: of the rendezvous; None: the process group was made elsewhere, or there is one process.
    """

    rank: int
    sizes: Sizes
    device: torch.device
    mesh: DeviceMesh | None = None
    host_group: dist.ProcessGroup | None = None
    timeout_seconds: float = 60 * ParallelConfig.collective_timeout_minutes
    store: dist.Store | None = None

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> World:
        """The world of a single process."""
        return cls(0, Sizes(), torch.device(device))

    def with_own_host_group(self) -> World:
        """The same processes with a host group of their own, for use in another thread. All have to call it."""
        if self.mesh is None:
            return self
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        return dataclasses.replace(self, host_group=dist.new_group(backend="gloo", timeout=timeout))

    @property
    def own_host_group(self) -> dist.ProcessGroup | None:
        """The host group that `with_own_host_group` has made; None for a single process."""
        assert self.mesh is None or self.host_group is not None, "with_own_host_group() makes one"
        return self.host_group

    @property
    def size(self) -> int:
        return self.sizes.world

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def coordinate(self, dimension: str) -> int:
        """This process's place along a dimension of the mesh."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(dimension)

    @property
    def tensor_rank(self) -> int:
        return self.coordinate("tensor")

    @property
    def pipeline_rank(self) -> int:
        return self.coordinate("pipeline")

    @property
    def data_rank(self) -> int:
        """Which of the batches of an update are this process's; 0 to sizes.data - 1."""
        return self.coordinate("replicate") * self.sizes.shard + self.coordinate("shard")

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.sizes.pipeline - 1

    @property
    def counts_loss(self) -> bool:
        """Whether this process adds its loss to sums over all processes: exactly one per batch does."""
        return self.is_last_stage and self.tensor_rank == 0

    def group(self, dimension: str) -> dist.ProcessGroup | None:
        """The processes that differ from this one along one dimension only; None for a single process."""
        return None if self.mesh is None else self.mesh.get_group(dimension)

    # -- collectives on the host: they wait for no device ------------------------------------------------------

    def sum_host(self, values: Sequence[float]) -> list[float]:
        """Sums over all processes, place by place, of as many numbers on each; integers up to 2^53 stay exact."""
        return self._reduce_host(values, dist.ReduceOp.SUM)

    def max_host(self, values: Sequence[float]) -> list[float]:
        """Maxima over all processes, place by place."""
        return self._reduce_host(values, dist.ReduceOp.MAX)

    def gather_json(self, value: Any) -> list[Any]:
        """The values of all processes, by rank; on every process. Values are what JSON holds."""
        return [value] if self.mesh is None else _gather_json(value, self.host_group)

    def broadcast_json(self, value: Any) -> Any:
        """The value of the main process, on every process; the other processes' values are ignored."""
        if self.mesh is None:
            return value
        content = _as_bytes(value if self.is_main else None)
        length = torch.tensor([content.numel()])
        dist.broadcast(length, src=0, group=self.host_group)
        if not self.is_main:
            content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self.host_group)
        return json.loads(content.numpy().tobytes())

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.sum_host([0.0])

    def name_missing_ranks(self, hint: str = "") -> AbstractContextManager[None]:
        """Inside, an error about a timeout names the ranks that did not arrive.

        Args:
            hint: the end of its message.
        """
        if self.store is None:
            return nullcontext()
        return name_missing_ranks(self.store, self.rank, self.size, self.timeout_seconds, hint)

    def _reduce_host(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.mesh is None:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, op=operation, group=self.host_group)  # on the CPU: by gloo, also where GPUs have NCCL
        return numbers.tolist()


def launched_processes() -> int | None:
    """How many processes torchrun or a similar launcher started, this one among them; None: none did."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def is_main_process() -> bool:
    """Whether this process may print before the world exists: rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def open_world(config: ParallelConfig, device: torch.device, facts: Facts | None = None) -> Iterator[World]:
    """The world of this process; inside, its process groups exist.

    Args:
        config: the chosen sizes, and how long processes wait for each other.
        device: as `resolve_device` found it; each rank takes the GPU of its local rank.
        facts: what this process was started with (`options_by_flag`), which must be the same on all.

    Raises:
        UserError: the sizes do not match the number of processes, or the GPUs do not; the processes were started
            differently.
        ProcessHangs: not all processes connected in time.
    """
    world_size = launched_processes() or 1
    sizes = resolve_sizes(config, world_size)
    if world_size == 1 and not config.needs_fsdp:
        yield World.single(_own_device(device, 1))
        return
    device = _own_device(device, world_size)
    # A device-bound backend and gloo side by side: tensors on the CPU go by gloo.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    seconds = 60 * config.collective_timeout_minutes
    timeout = datetime.timedelta(seconds=seconds)
    rank, own_store = _connect(world_size, timeout)
    # With a device NCCL connects here, so that a bad network is found at the start, and splits groups from this one.
    connected = device if device.type == "cuda" else None
    dist.init_process_group(
        backend, timeout=timeout, store=own_store, rank=rank, world_size=world_size, device_id=connected
    )
    try:
        # Before groups are made: with other sizes a process would wait for groups that the others never make.
        check_same_start({**(facts or {}), **environment_facts()}, lambda value: _gather_json(value, None))
        world = dataclasses.replace(make_world(sizes, device, seconds), store=own_store)
        if device.type == "cuda":
            refuse_shared_gpus(world.gather_json(str(torch.cuda.get_device_properties(device).uuid)))
        yield world
        dist.barrier()  # without it, processes that end at different times abort now and then
    except BaseException:
        # NCCL's orderly end waits for the others, which wait for this process and would not learn that it failed.
        with suppress(RuntimeError):  # of a GPU that has failed itself; the error in flight is more specific
            dist.distributed_c10d._abort_process_group()
        raise
    else:
        dist.destroy_process_group()
    finally:
        time.sleep(GLOO_SECONDS)


def _connect(world_size: int, timeout: datetime.timedelta) -> tuple[int, dist.Store]:
    """The rank of this process, and a store that all of this start share."""
    if world_size == 1:
        return 0, dist.HashStore()
    store, rank, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # Groups leave addresses there, which those of another world in this process, or of a restart, must not find.
    return rank, dist.PrefixStore(wait_for_all(store, rank, world_size, timeout.total_seconds()), store)


def make_world(sizes: Sizes, device: torch.device | str, timeout_seconds: float | None = None) -> World:
    """The world over an existing process group, whose size is that of the mesh.

    Args:
        timeout_seconds: of its groups; None: as `World` has it.
    """
    device = torch.device(device)
    world = World(dist.get_rank(), sizes, device)
    if timeout_seconds is not None:
        world = dataclasses.replace(world, timeout_seconds=timeout_seconds)
    ranks = torch.arange(sizes.world).reshape(tuple(sizes))
    groups = _dimension_groups(ranks, world.rank, datetime.timedelta(seconds=world.timeout_seconds))
    mesh = dist.device_mesh.DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=DIMENSIONS)
    return dataclasses.replace(world, mesh=mesh)


def refuse_shared_gpus(gpus: Sequence[str]) -> None:
    """Refuse processes of which two have the same GPU.

    Args:
        gpus: what identifies it, by rank.

    Raises:
        UserError: naming two of them.
    """
    first = {gpu: rank for rank, gpu in reversed(list(enumerate(gpus)))}
    for rank, gpu in enumerate(gpus):
        if first[gpu] != rank:
            raise UserError(
                f"processes {first[gpu]} and {rank} have the same GPU; start as many processes on a machine as it has "
                "GPUs (torchrun --nproc-per-node; with another launcher LOCAL_RANK numbers them), or give `device` cpu"
            )


def _dimension_groups(ranks: torch.Tensor, rank: int, timeout: datetime.timedelta) -> list[dist.ProcessGroup]:
    """The groups of this process, one per dimension of the mesh.

    `init_device_mesh` would give them torch's own time limit, and make one for each process along each dimension of
    size 1, which all processes have to call for.
    """
    alone: dist.ProcessGroup | None = None
    groups: list[dist.ProcessGroup] = []
    for dimension, size in enumerate(ranks.shape):
        group = alone
        if size == ranks.numel():
            group = dist.group.WORLD
        elif size == 1 and alone is None:
            group = alone = dist.new_group([rank], timeout=timeout, use_local_synchronization=True)
        elif size > 1:
            for members in ranks.movedim(dimension, -1).reshape(-1, size).tolist():
                made = dist.new_group(members, timeout=timeout, group_desc=f"mesh_{DIMENSIONS[dimension]}")
                group = made if rank in members else group
        assert group is not None
        groups.append(group)
    return groups


def _gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    own = _as_bytes(value)
    longest = torch.tensor(own.numel())
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    padded = torch.full((int(longest),), ord(" "), dtype=torch.uint8)
    padded[: own.numel()] = own
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, padded, group=group)
    return [json.loads(part.numpy().tobytes()) for part in gathered]


def _as_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _own_device(device: torch.device, world_size: int) -> torch.device:
    """The device of this process, before any communication."""
    if device.type != "cuda":
        return device
    if world_size == 1:
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        return device
    if device.index is not None:
        raise UserError(
            f"`device` {device} is one GPU, but {world_size} processes were started; with `device` cuda each takes its "
            "own (CUDA_VISIBLE_DEVICES chooses among those of a machine)"
        )
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count > 1:
        raise UserError(
            f"process {local} of this machine finds {count} GPUs; start one process per GPU "
            f"(torchrun --nproc-per-node {count}), or give `device` cpu"
        )
    own = torch.device("cuda", local if count > 1 else 0)  # Slurm may show each process none but its own
    torch.cuda.set_device(own)
    return own


def resolve_device(name: str | torch.device) -> torch.device:
    """The device that `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:N` or a device means on this machine.

    Raises:
        UserError: no such device, or no GPU that this PyTorch can use.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"`device` is {name!r}; it must be auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise UserError(f"`device` {name}: PyTorch {torch.__version__} finds no GPU; use `device` cpu")
        if device.index is not None and device.index >= count:
            raise UserError(f"`device` {name}: there are {count} GPUs, cuda:0 to cuda:{count - 1}")
    return device
