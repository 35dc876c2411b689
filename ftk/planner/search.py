"""All layouts of a run on a number of GPUs: the impossible ones with their reasons, the others by their time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ftk.errors import UserError
from ftk.planner.cluster import GIB, Cluster
from ftk.planner.communication import Traffic, traffic
from ftk.planner.layout import Layout, MeshPlace, Workload, conflicts
from ftk.planner.memory import Memory, candidates, memory
from ftk.planner.model_shape import ModelShape
from ftk.planner.plan_config import LimitsConfig
from ftk.planner.step_time import StepTime, step_time

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_shard_size", "data_parallel_replicate_size")


@dataclass(frozen=True)
class Plan:
    """A layout with what it takes."""

    layout: Layout
    memory: Memory
    time: StepTime


@dataclass
class SearchResult:
    """What a search gives.

    Attributes:
        plans: those that fit, the fastest first.
        refused: why others do not -> with which numbers -> how many.
        smallest: of those that only lack memory, the one that lacks the least; None if there is none.
    """

    plans: list[Plan] = field(default_factory=list)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    smallest: tuple[Layout, Memory] | None = None


def search(
    shape: ModelShape, work: Workload, cluster: Cluster, gpus: int, limits: LimitsConfig, efficiency: float
) -> SearchResult:
    """Every layout of `gpus` GPUs, within limits.

    Args:
        gpus: the world's size.
        efficiency: of the peak, what matrix products reach.
    """
    found = SearchResult()
    for layout in layouts(shape, work, gpus, limits):
        conflict = next(conflicts(layout, shape, work), None)
        if conflict is not None:
            found.refused.setdefault(conflict.reason, Counter())[conflict.numbers] += 1
            continue
        needed = memory(layout, shape, work)
        if needed.total > cluster.memory_bytes:
            reason = f"more memory than the {cluster.memory_bytes / GIB:.1f} GiB that a GPU has for it"
            found.refused.setdefault(reason, Counter())[""] += 1
            if found.smallest is None or needed.total < found.smallest[1].total:
                found.smallest = layout, needed
            continue
        found.plans.append(Plan(layout, needed, step_time(layout, shape, work, cluster, efficiency)))
    found.plans.sort(key=lambda plan: (plan.time.total, plan.memory.total))
    return found


def check_sizes(gpus: int, limits: LimitsConfig) -> None:
    """Refuse sizes whose product cannot be the number of GPUs, whatever the other sizes are.

    Raises:
        UserError: with the numbers.
    """
    sizes = {f"`{name}`": getattr(limits, name) for name in _SIZES}
    given = {name: size for name, size in sizes.items() if size is not None}
    product = math.prod(given.values())
    if gpus % product == 0 and (len(given) < len(sizes) or product == gpus):
        return
    text = " x ".join(f"{name} {size}" for name, size in given.items()) + (f" = {product}" if len(given) > 1 else "")
    if len(given) == len(sizes):
        raise UserError(f"{text} is not the number of GPUs, {gpus}; leave out one size, or give `gpus` {product}")
    raise UserError(f"{text} does not divide the number of GPUs, {gpus}; give sizes that do")


def layouts(shape: ModelShape, work: Workload, gpus: int, limits: LimitsConfig) -> Iterator[Layout]:
    """All combinations, those that cannot be among them.

    What makes no difference is not varied: ZeRO stages without shards, sequence parallel without tensor parallel.
    Micro-batches are powers of two that divide a data rank's samples.
    """
    for tensor, pipeline, shard, replicate in meshes(gpus, limits, shape):
        rest = work.global_batch // (shard * replicate)
        divides = work.global_batch % (shard * replicate) == 0 and rest > 0
        sizes = _given(limits.batch_size, powers_of_two(rest) if divides else [1])
        sequences = _given(limits.sequence_parallel, [False, True] if tensor > 1 else [False])
        if pipeline > 1 and shard * replicate > 1:
            stages = _given(limits.zero_stage, [1]) if shard > 1 else [1]  # 2 and 3 are refused
        else:
            stages = _given(limits.zero_stage, [1, 2, 3]) if shard > 1 else [3]
        modes = _given(limits.activation_checkpointing, ["none", "selective", "full"])
        for size, sequence, stage, mode in product(sizes, sequences, stages, modes):
            yield Layout(
                tensor=tensor,
                pipeline=pipeline,
                replicate=replicate,
                shard=shard,
                batch_size=size,
                sequence_parallel=sequence,
                zero_stage=stage,
                checkpointing=mode,
                schedule=limits.pipeline_schedule if pipeline > 1 else "1f1b",
                stages_per_rank=limits.stages_per_rank if pipeline > 1 else 1,
            )


def meshes(gpus: int, limits: LimitsConfig, shape: ModelShape) -> Iterator[tuple[int, int, int, int]]:
    """(T, P, S, R) whose product is the number of GPUs; no T above the heads and no P above the layers unless given."""
    for tensor in _given(limits.tensor_parallel_size, [n for n in divisors(gpus) if n <= shape.num_attention_heads]):
        for pipeline in _given(limits.pipeline_parallel_size, [n for n in divisors(gpus) if n <= shape.num_layers]):
            if gpus % (tensor * pipeline):
                continue
            data = gpus // (tensor * pipeline)
            for shard in _given(limits.data_parallel_shard_size, divisors(data)):
                if data % shard == 0 and limits.data_parallel_replicate_size in (None, data // shard):
                    yield tensor, pipeline, shard, data // shard


def best_of_each_mesh(plans: Iterable[Plan]) -> list[Plan]:
    """Of plans with equal T, P, S and R the first."""
    seen: dict[tuple[int, int, int, int], Plan] = {}
    for plan in plans:
        layout = plan.layout
        seen.setdefault((layout.tensor, layout.pipeline, layout.shard, layout.replicate), plan)
    return list(seen.values())


def messages(plan: Plan, shape: ModelShape, work: Workload) -> list[Traffic]:
    """Of the place in the pipeline that sends the most."""
    lists = [traffic(plan.layout, shape, work, MeshPlace(rank)) for rank in candidates(plan.layout)]
    return max(lists, key=lambda found: sum(message.total_bytes for message in found))


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def powers_of_two(number: int) -> list[int]:
    """1, 2, 4, ... as far as they divide."""
    found = [1]
    while number % (2 * found[-1]) == 0:
        found.append(2 * found[-1])
    return found


def _given(value: Any, otherwise: list[Any]) -> list[Any]:
    return otherwise if value is None else [value]
