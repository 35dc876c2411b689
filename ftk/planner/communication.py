"""The messages of an update: which collective, along which dimension of the mesh, how often, how large.

Tensor parallel: Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053, section 3); sequence parallel: Korthikanti et
al. 2022 (https://arxiv.org/abs/2205.05198, section 4.2.2); sharding: Rajbhandari et al. 2020
(https://arxiv.org/abs/1910.02054, section 7); pipeline: Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473, 4.1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ftk.planner.layout import FIRST_PLACE, Layout, MeshPlace, Workload
from ftk.planner.memory import (
    MASTER_BYTES,
    LayerGroup,
    gather_bytes,
    hidden_numel,
    layer_groups,
    rank_stages,
    sent_hidden_bytes,
    unit_numel,
)
from ftk.planner.model_shape import ModelShape, ParameterShape

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND = "all-reduce", "all-gather", "reduce-scatter", "send"

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""Of DDP."""


@dataclass(frozen=True)
class Traffic:
    """Messages of one kind and size in an update of one process.

    Attributes:
        collective: all-reduce, all-gather, reduce-scatter or send (each with its receive on the other side).
        dimension: of the mesh: tensor, shard, replicate or pipeline.
        what: what is sent, in words.
        count: in an update.
        message_bytes: of one: the whole tensor, that is of an all-gather what comes out, of a reduce-scatter what goes
            in.
        when: "forward", "backward" or "update": with the passes of each micro-batch, or once.
    """

    collective: str
    dimension: str
    what: str
    count: int
    message_bytes: int
    when: str

    @property
    def total_bytes(self) -> int:
        return self.count * self.message_bytes

    def sent_bytes(self, size: int) -> float:
        """What one process of `size` sends of all, by the ring algorithm: an all-reduce is the two others."""
        if self.collective == SEND:
            return self.total_bytes
        return self.total_bytes * (size - 1) / size * (2 if self.collective == ALL_REDUCE else 1)


def traffic(layout: Layout, shape: ModelShape, work: Workload, place: MeshPlace = FIRST_PLACE) -> list[Traffic]:
    """All messages of an update of one process; those of size zero are left out.

    Numbers that are exchanged for the log or the gradient norm (a few bytes per update) are not listed.
    """
    found = [
        *tensor_traffic(layout, shape, work, place),
        *data_traffic(layout, shape, work, place),
        *pipeline_traffic(layout, shape, work, place),
    ]
    return [message for message in found if message.total_bytes]


def tensor_traffic(layout: Layout, shape: ModelShape, work: Workload, place: MeshPlace) -> Iterator[Traffic]:
    """Between the processes that share matrices.

    A layer sums twice in each pass: what attention and the feed-forward network give, and in the backward pass the
    gradients of what they read. With sequence parallel each sum is a reduce-scatter along the sequence, and an
    all-gather comes before each pair of matrices; both have their opposite in the backward pass. A checkpointed layer
    gathers again; sums it takes again under "full" alone, up to the last that its backward pass needs: the last one
    only for dropout or a norm behind it.

    A layer that reads an encoder sums once more, and each of its ranks has a part of the gradient of the encoder's
    states. Gated networks have two matrices with inputs.
    """
    if layout.tensor == 1:
        return
    own = rank_stages(layout, shape, place.pipeline)
    count = layout.micro_batches(work.global_batch)
    for group in layer_groups(shape, work, own):
        yield from _layer_traffic(layout, shape, work, group, count)
    if layout.sequence_parallel:
        partial = [p for stage in own for p in shape.of_stage(*stage) if p.is_partial]
        numel = sum(local_numel(p, layout, place) for p in partial)
        yield Traffic(ALL_REDUCE, "tensor", "gradients of norms and positions", 1, numel * MASTER_BYTES, "update")
    if own[0][0] == 0:
        yield from _embedding_traffic(layout, shape, work, count)
    if own[-1][1] == shape.num_layers:
        yield from _loss_traffic(layout, shape, work, count)


def _layer_traffic(
    layout: Layout, shape: ModelShape, work: Workload, group: LayerGroup, count: int
) -> Iterator[Traffic]:
    """Of all layers of a group; inputs are of matrices that ranks share, outputs are summed."""
    layers, keeps_last = count * group.number, shape.has_dropout or shape.is_post_norm
    for tokens, inputs, outputs in ((group.tokens, group.parts + shape.is_gated, group.parts), (group.source, 1, 0)):
        size = hidden_numel(layout, shape, tokens) * work.value_bytes
        recomputed_inputs = inputs if layout.checkpointing != "none" else 0
        recomputed_outputs = max(0, outputs - (not keeps_last)) if layout.checkpointing == "full" else 0
        sequence = layout.sequence_parallel
        sums = REDUCE_SCATTER if sequence else ALL_REDUCE
        if sequence:
            yield Traffic(ALL_GATHER, "tensor", "inputs of matrices", layers * inputs, size, "forward")
        yield Traffic(sums, "tensor", "outputs of matrices", layers * outputs, size, "forward")
        if sequence:
            yield Traffic(
                ALL_GATHER, "tensor", "inputs of matrices, recomputed", layers * recomputed_inputs, size, "backward"
            )
        yield Traffic(sums, "tensor", "outputs of matrices, recomputed", layers * recomputed_outputs, size, "backward")
        if sequence:
            yield Traffic(ALL_GATHER, "tensor", "gradients of outputs", layers * outputs, size, "backward")
        yield Traffic(sums, "tensor", "gradients of inputs", layers * inputs, size, "backward")


def _embedding_traffic(layout: Layout, shape: ModelShape, work: Workload, count: int) -> Iterator[Traffic]:
    """Each process gives the rows of the vocabulary that it has; they are added."""
    for tokens in (work.num_tokens, work.decoder_tokens):
        size = hidden_numel(layout, shape, tokens) * MASTER_BYTES
        if layout.sequence_parallel:
            yield Traffic(REDUCE_SCATTER, "tensor", "token embeddings", count, size, "forward")
            yield Traffic(ALL_GATHER, "tensor", "gradients of token embeddings", count, size, "backward")
        else:
            yield Traffic(ALL_REDUCE, "tensor", "token embeddings", count, size, "forward")


def _loss_traffic(layout: Layout, shape: ModelShape, work: Workload, count: int) -> Iterator[Traffic]:
    """Of each target's logits the largest, then the sum of exponentials and the true one; a chunk of targets at a time.
    In the backward pass the gradients of the hidden states that have loss are added."""
    if layout.sequence_parallel:
        size = hidden_numel(layout, shape, work.written_tokens) * MASTER_BYTES
        yield Traffic(ALL_GATHER, "tensor", "normed hidden states", count, size, "forward")
    targets = work.num_targets(layout.batch_size)
    chunks, rest = divmod(targets, work.loss_chunk_tokens)
    for length, number in ((work.loss_chunk_tokens, chunks), (rest, min(1, rest))):
        yield Traffic(ALL_REDUCE, "tensor", "largest logits", count * number, length * 4, "forward")
        yield Traffic(ALL_REDUCE, "tensor", "sums of exponentials", count * number, length * 8, "forward")
    size = targets * shape.hidden_size * MASTER_BYTES
    yield Traffic(ALL_REDUCE, "tensor", "gradients of hidden states with loss", count, size, "backward")


def local_numel(parameter: ParameterShape, layout: Layout, place: MeshPlace) -> int:
    """Numbers that one process holds of a parameter."""
    return math.prod(parameter.local_shape(layout.tensor, layout.shard, place.tensor, place.shard))


# -- data parallel --------------------------------------------------------------------------------------------------


def data_traffic(layout: Layout, shape: ModelShape, work: Workload, place: MeshPlace) -> Iterator[Traffic]:
    """Between the processes that take batches of their own.

    DDP sums all gradients once per update. FSDP2 gathers parameters and scatters gradients unit by unit (a block, or
    what is in none): under ZeRO-3 blocks twice and the rest once for each micro-batch, under ZeRO-2 gathers once an
    update, under ZeRO-1 both. Between copies of what is sharded (HSDP) gradients are summed once per update.
    """
    stages = rank_stages(layout, shape, place.pipeline)
    if layout.data == 1:
        return
    if not layout.uses_fsdp:
        whole = [math.prod(parameter.shape) for stage in stages for parameter in shape.of_stage(*stage)]
        buckets = ddp_buckets([MASTER_BYTES * numel for numel in reversed(whole)])
        for size, number in sorted(Counter(buckets).items(), reverse=True):
            yield Traffic(ALL_REDUCE, "replicate", "gradients", number, size, "update")
        return
    units: Counter[tuple[int, bool]] = Counter()  # (numbers, whether it is a block) -> how many
    for first, last in stages:
        found = unit_numel(shape, layout.tensor, layout.shard, first, last, place.tensor)
        units.update((numel, True) for numel in found.blocks)
        units.update([(found.rest, False)] if found.rest else [])
    each = layout.micro_batches(work.global_batch)
    gathers = each if layout.zero_stage == 3 else 1
    scatters = 1 if layout.zero_stage == 1 else each
    gather_when = "forward" if layout.zero_stage == 3 else "update"
    scatter_when = "update" if layout.zero_stage == 1 else "backward"
    for (numel, is_block), number in sorted(units.items(), reverse=True):
        what = "blocks" if is_block else "the rest"
        size = numel * (gather_bytes(layout, work) if is_block else MASTER_BYTES)
        if layout.shard > 1:
            yield Traffic(ALL_GATHER, "shard", f"parameters of {what}", gathers * number, size, gather_when)
            if layout.zero_stage == 3 and is_block:
                yield Traffic(ALL_GATHER, "shard", f"parameters of {what}", gathers * number, size, "backward")
            size = numel * MASTER_BYTES
            yield Traffic(REDUCE_SCATTER, "shard", f"gradients of {what}", scatters * number, size, scatter_when)
        if layout.replicate > 1:
            size = numel // layout.shard * MASTER_BYTES
            yield Traffic(ALL_REDUCE, "replicate", f"gradients of {what}", number, size, "update")


def ddp_buckets(sizes: Iterable[int]) -> list[int]:
    """Bytes of each bucket: closed as soon as 1 MiB, from the second on 25 MiB, are reached, as DDP does it.

    Args:
        sizes: bytes of each gradient, in the order in which they become ready.
    """
    buckets, filled, limit = [], 0, FIRST_BUCKET_BYTES
    for size in sizes:
        filled += size
        if filled >= limit:
            buckets.append(filled)
            filled, limit = 0, BUCKET_BYTES
    return [*buckets, filled] if filled else buckets


# -- pipeline -------------------------------------------------------------------------------------------------------


def pipeline_traffic(layout: Layout, shape: ModelShape, work: Workload, place: MeshPlace) -> Iterator[Traffic]:
    """Between stages: hidden states forward, their gradients backward, of each micro-batch; first and last
    stage send each other the gradient of what is tied once per update."""
    if layout.pipeline == 1:
        return
    count = layout.micro_batches(work.global_batch)
    size = sent_hidden_bytes(layout, shape, work)
    own = rank_stages(layout, shape, place.pipeline)
    forward = sum(last < shape.num_layers for _, last in own)
    backward = sum(first > 0 for first, _ in own)
    yield Traffic(SEND, "pipeline", "hidden states", count * forward, size, "forward")
    yield Traffic(SEND, "pipeline", "gradients of hidden states", count * backward, size, "backward")
    if own[0][0] == 0 or own[-1][1] == shape.num_layers:
        for parameter in shape.parameters:
            if parameter.is_tied:
                size = MASTER_BYTES * local_numel(parameter, layout, place)
                yield Traffic(SEND, "pipeline", f"gradient of {parameter.name}, tied", 1, size, "update")
