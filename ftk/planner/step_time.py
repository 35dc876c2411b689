"""How long an update takes: arithmetic, messages that nothing hides, the pipeline's bubble, the optimizer.

The bubble is that of Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473, section 2.2), for the zero-bubble
schedule of Qi et al. 2023 (https://arxiv.org/abs/2401.10241, section 2: ZB-H1). Messages take their latency and their
bytes by the bandwidth of a ring. What is estimated here ranks layouts; it has not been held against a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ftk.models.flops import DecoderWork
from ftk.planner.cluster import Cluster
from ftk.planner.communication import SEND, Traffic, traffic
from ftk.planner.layout import Layout, MeshPlace, Workload
from ftk.planner.memory import candidates, layer_activations, layer_groups, rank_numel, rank_stages
from ftk.planner.model_shape import ModelShape

LATENCY_SECONDS = 8e-6
"""Of a message, for each doubling of the number of its processes."""

PASSES_OVER_ACTIVATIONS = 5
"""How often norms, activations, dropout and additions move what a layer keeps: written and read, and in the backward
pass read again, its gradient written and read."""

LAUNCHES_SECONDS = 3e-4
"""Of a layer in both passes of a micro-batch, however small that is: some forty kernels, of which a host starts one in
some 8 microseconds; estimated, not measured. A micro-batch of too few tokens leaves the GPU waiting for its host."""

ZERO_BUBBLE_SHARE = 1 / 3
"""Of the bubble of 1F1B: (F + B - W) / (F + B + W) with forward, input and weight gradients of equal length."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an update by part, of the process that takes longest; `total` is their sum.

    Attributes:
        compute: matrix products, recomputed ones included.
        elementwise: what is bound by the GPU's memory, or by the host that starts the kernels of small batches.
        tensor, pipeline, data: messages along these dimensions that no arithmetic hides.
        bubble: waiting for the pipeline to fill and drain.
        optimizer: norm, clipping, update of the weights.
        mfu: operations of the model, none counted twice, by the peak of all GPUs.
    """

    compute: float
    elementwise: float
    tensor: float
    pipeline: float
    data: float
    bubble: float
    optimizer: float
    mfu: float
    tokens_per_second: float

    @property
    def parts(self) -> dict[str, float]:
        names = ("compute", "elementwise", "tensor", "pipeline", "data", "bubble", "optimizer")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def step_time(layout: Layout, shape: ModelShape, work: Workload, cluster: Cluster, efficiency: float) -> StepTime:
    """The estimate, of the slowest place of the pipeline.

    Args:
        efficiency: of the peak, what matrix products reach.
    """
    found = [_rank_time(layout, shape, work, cluster, efficiency, rank) for rank in candidates(layout)]
    parts = max(found, key=lambda seconds: sum(seconds.values()))
    total = sum(parts.values())
    tokens = work.global_batch * (work.num_tokens + work.decoder_tokens)
    flops = passes_flops(shape, work, work.global_batch, work.num_targets(work.global_batch))
    mfu = flops / (total * layout.world * cluster.flops(work.precision))
    return StepTime(**parts, mfu=mfu, tokens_per_second=tokens / total)


def message_seconds(message: Traffic, layout: Layout, cluster: Cluster) -> float:
    """All messages of a group, one after the other."""
    size, stride = ring(message.dimension, layout)
    hops = math.log2(size) if message.collective != SEND else 1
    return message.sent_bytes(size) / cluster.bus_bandwidth(size, stride) + message.count * hops * LATENCY_SECONDS


def ring(dimension: str, layout: Layout) -> tuple[int, int]:
    """(processes along a dimension of the mesh, ranks from one to the next); tensor is the innermost."""
    stride = 1
    for name in ("tensor", "shard", "replicate", "pipeline"):
        size = getattr(layout, name)
        if name == dimension:
            return size, stride
        stride *= size
    raise ValueError(dimension)


def _rank_time(
    layout: Layout, shape: ModelShape, work: Workload, cluster: Cluster, efficiency: float, rank: int
) -> dict[str, float]:
    count = layout.micro_batches(work.global_batch)
    own = rank_stages(layout, shape, rank)
    layers = sum(last - first for first, last in own)
    flops = micro_batch_flops(layout, shape, work, own)
    compute = flops / (cluster.flops(work.precision) * efficiency)
    elementwise = elementwise_bytes(layout, shape, work, own) / cluster.memory_bandwidth
    elementwise = max(elementwise, layers * LAUNCHES_SECONDS - compute)
    messages = traffic(layout, shape, work, MeshPlace(rank))
    tensor = _seconds(messages, layout, cluster, "tensor", ("forward", "backward")) / count
    pipeline = _seconds(messages, layout, cluster, "pipeline", ("forward", "backward")) / count
    pass_seconds = compute + elementwise + tensor  # forward and backward of a micro-batch
    waits = bubble_micro_batches(layout) * (pass_seconds + pipeline)
    once = _seconds(messages, layout, cluster, "tensor", ("update",))
    tied = _seconds(messages, layout, cluster, "pipeline", ("update",))
    numbers = rank_numel(layout, shape, rank)
    return {
        "compute": compute * count,
        "elementwise": elementwise * count,
        "tensor": tensor * count + once,
        "pipeline": pipeline * count + tied,
        "data": exposed_data_seconds(messages, layout, cluster, pass_seconds, count, layers),
        "bubble": waits,
        "optimizer": numbers * (24 + 2 * work.state_bytes) / cluster.memory_bandwidth,
    }


def passes_flops(shape: ModelShape, work: Workload, samples: int, targets: int) -> int:
    """Operations of a forward and a backward pass through the whole model."""
    tokens, own = samples * work.num_tokens, samples * work.decoder_tokens
    count = tokens, targets, tokens * work.num_tokens
    if not shape.encoder_layers:
        return shape.training_flops(*count)
    return shape.training_flops(*count, DecoderWork(own, own * work.decoder_tokens, own * work.num_tokens))


def micro_batch_flops(layout: Layout, shape: ModelShape, work: Workload, stages: Iterable[tuple[int, int]]) -> float:
    """Operations of one process for a micro-batch, forward and backward; a checkpointed layer goes forward twice.

    Args:
        stages: of the process, as `rank_stages` gives them.
    """
    stages = list(stages)
    all_layers = passes_flops(shape, work, layout.batch_size, 0)
    decoder_layers, of_encoder = shape.num_layers - shape.encoder_layers, 0
    if shape.encoder_layers:  # its states are projected by the decoder's layers, even where these have no tokens
        tokens = layout.batch_size * work.num_tokens
        of_encoder = shape.training_flops(tokens, 0, tokens * work.num_tokens, DecoderWork(0, 0, 0))
        of_encoder -= 12 * tokens * shape.hidden_size * shape.attention_width * decoder_layers
    flops = 0.0
    for group in layer_groups(shape, work, stages):
        is_encoder = shape.encoder_layers > 0 and not group.source
        each = of_encoder / shape.encoder_layers if is_encoder else (all_layers - of_encoder) / decoder_layers
        flops += group.number * each
    if layout.checkpointing == "full":
        flops *= 4 / 3
    if any(last == shape.num_layers for _, last in stages):
        flops += passes_flops(shape, work, layout.batch_size, work.num_targets(layout.batch_size)) - all_layers
    return flops / layout.tensor


def elementwise_bytes(layout: Layout, shape: ModelShape, work: Workload, stages: Iterable[tuple[int, int]]) -> float:
    """Bytes that layers move besides their matrix products, in both passes of a micro-batch."""
    whole = replace(layout, checkpointing="none")
    groups = layer_groups(shape, work, stages)
    kept = sum(group.number * layer_activations(whole, shape, work, group) for group in groups)
    return kept * (PASSES_OVER_ACTIVATIONS + (0 if layout.checkpointing == "none" else 2))


def bubble_micro_batches(layout: Layout) -> float:
    """Passes of a micro-batch through a rank for which it waits: P - 1, shared by the stages of a rank."""
    waits = (layout.pipeline - 1) / layout.stages_per_rank
    return waits * (ZERO_BUBBLE_SHARE if layout.schedule == "zero-bubble" else 1.0)


def exposed_data_seconds(
    messages: Iterable[Traffic], layout: Layout, cluster: Cluster, pass_seconds: float, count: int, layers: int
) -> float:
    """Messages of data parallel that arithmetic does not hide.

    Blocks are gathered ahead and scattered behind, so that a pass hides as many messages as it is long, all but those
    of one block: the first that is gathered and the last that is scattered. What goes out once an update has the
    backward pass of the last micro-batch to hide in, two thirds of a pass.
    """
    messages = [message for message in messages if message.dimension in ("shard", "replicate")]
    exposed = 0.0
    for when, share in (("forward", 1 / 3), ("backward", 2 / 3), ("update", 2 / 3)):
        seconds = _seconds(messages, layout, cluster, None, (when,))
        times = 1 if when == "update" else count
        hidden = times * share * pass_seconds
        exposed += max(seconds / max(1, layers), seconds - hidden) if seconds else 0.0
    return exposed


def _seconds(
    messages: Iterable[Traffic], layout: Layout, cluster: Cluster, dimension: str | None, when: tuple[str, ...]
) -> float:
    found = [message for message in messages if dimension in (None, message.dimension) and message.when in when]
    return sum(message_seconds(message, layout, cluster) for message in found)
