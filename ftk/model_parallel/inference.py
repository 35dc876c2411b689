"""A model for generation and scoring, spread over processes: tensor parallel, pipeline, or both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.world import World


def distribute_for_inference(
    build: Callable[[], nn.Module], world: World, load: Callable[[nn.Module], None]
) -> nn.Module:
    """This process's part of a model, with its weights.

    No process ever holds more than its part: the model is built on the meta device.

    Args:
        build: builds the whole model.
        world: of this process; each of its data ranks has the whole model in its parts.
        load: fills the parameters of what it is given, which have the names of the whole model, and are DTensors
            where they are shared.

    Returns:
        What is called as the whole model is, by all processes of a data rank at once: with the same arguments it gives
        the same logits on each of them.

    Raises:
        UserError: the model cannot be cut so.
    """
    from ftk.model_parallel.materialize import allocate, fill_unsaved
    from ftk.model_parallel.pipeline.inference import PipelinedModel
    from ftk.model_parallel.pipeline.layout import pipeline_layout
    from ftk.model_parallel.pipeline.stages import cut_model, layers_of
    from ftk.model_parallel.tensor_parallel.apply import apply_plan
    from ftk.model_parallel.tensor_parallel.plan import plan_of

    assert world.mesh is not None
    assert world.sizes.shard == 1, "parameters are sharded in training only"
    with torch.device("meta"):
        model = build()
    own, part, stages = model, None, world.sizes.pipeline
    if stages > 1:
        layout = pipeline_layout(len(layers_of(model)), ParallelConfig(pipeline_parallel_size=stages))
        part = cut_model(model, layout, world.pipeline_rank)
        own = part.model
    if world.sizes.tensor > 1:
        apply_plan(own, plan_of(model, world.sizes.tensor), world.mesh["tensor"], partial=stages > 1)
    allocate(own, world.device)
    fill_unsaved(own)
    load(own)
    if part is None:
        return own.eval()
    group = world.group("pipeline")
    assert group is not None
    return PipelinedModel(part, group).eval()
