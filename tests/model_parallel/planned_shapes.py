"""Compares a plan with PyTorch: a process of a fake world lays out the model on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.pipeline.layout import PipelineLayout
from ftk.model_parallel.pipeline.stages import cut_model, layers_of
from ftk.model_parallel.shards import canonical_name, local
from ftk.model_parallel.world import Sizes, World, make_world
from ftk.planner.layout import FIRST_PLACE, Layout, MeshPlace
from ftk.planner.memory import rank_stages
from ftk.planner.model_shape import ModelShape

Shapes = dict[str, tuple[int, ...]]


class Checked(NamedTuple):
    """What came of it."""

    places: int  # processes that were tried
    shapes: int  # of parameters
    differences: list[str]


def check_shapes(build: Callable[[], nn.Module], shape: ModelShape, layout: Layout) -> Checked:
    """Compare what processes would hold by DTensor and FSDP2 with the plan.

    Of tensor and shard ranks the first and the last are tried, which differ where something does not divide, and of the
    pipeline all. Nothing is sent: the process group is PyTorch's fake one, of any size.

    Args:
        build: makes the model on the meta device, once per process.
    """
    differences, places, shapes = [], 0, 0
    ends = (range(layout.pipeline), {0, layout.tensor - 1}, {0, layout.shard - 1})
    for place in (MeshPlace(*coordinates) for coordinates in product(*ends)):
        with fake_world(layout, place) as world:
            real = real_shapes(build(), world, layout)
        planned = planned_shapes(layout, shape, place)
        places, shapes = places + 1, shapes + len(real)
        for name in sorted(real.keys() | planned.keys()):
            if real.get(name) != planned.get(name):
                differences.append(f"{place}: {name} is {real.get(name)}, planned as {planned.get(name)}")
    return Checked(places, shapes, differences)


def planned_shapes(layout: Layout, shape: ModelShape, place: MeshPlace) -> Shapes:
    """What a process holds by the plan."""
    parameters = [p for stage in rank_stages(layout, shape, place.pipeline) for p in shape.of_stage(*stage)]
    return {p.name: p.local_shape(layout.tensor, layout.shard, place.tensor, place.shard) for p in parameters}


def real_shapes(model: nn.Module, world: World, layout: Layout) -> Shapes:
    """What a process of this world holds of a model on the meta device, laid out as for training.

    Args:
        model: whole; it is changed.
    """
    from ftk.model_parallel.data_parallel import uses_fsdp
    from ftk.model_parallel.fully_sharded import apply_fsdp
    from ftk.model_parallel.tensor_parallel.apply import apply_plan

    assert world.mesh is not None
    stages: tuple[nn.Module, ...] = (model,)
    if layout.pipeline > 1:
        cut = PipelineLayout(layout.stage_layers(len(layers_of(model))), layout.pipeline)
        stages = cut_model(model, cut, world.pipeline_rank).stages
    config = ParallelConfig(zero_stage=layout.zero_stage)
    found: Shapes = {}
    for stage in stages:
        if layout.tensor > 1:
            plan: Any = stage.tensor_parallel_plan
            apply_plan(stage, plan, world.mesh["tensor"], layout.sequence_parallel, partial=layout.pipeline > 1)
        if uses_fsdp(world, config):
            over = world.mesh["replicate", "shard"] if layout.replicate > 1 else world.mesh["shard"]
            apply_fsdp(stage, over, config, "fp32")
        found |= {canonical_name(name, stage): tuple(local(p).shape) for name, p in stage.named_parameters()}
    return found


@contextmanager
def fake_world(layout: Layout, place: MeshPlace = FIRST_PLACE) -> Iterator[World]:
    """One process of a world whose messages go nowhere; for that time the process's default group is of it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = Sizes(layout.pipeline, layout.replicate, layout.shard, layout.tensor)
    rank = (place.pipeline * sizes.data + place.shard) * sizes.tensor + place.tensor
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes.world)
    try:
        yield make_world(sizes, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """DTensor keeps what it has found out of shardings with the mesh that they were of; to an equal mesh of another
    world, whose groups have other names, it would give the old one."""
    from torch.distributed.tensor import debug

    forget = getattr(debug, "_clear_sharding_prop_cache", None)
    if forget is not None:
        forget()
