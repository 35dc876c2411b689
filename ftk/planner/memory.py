"""Memory of one process by part: what is kept of the parameters, what of the activations, and what messages need.

Parameters, gradients and optimizer state are counted from the shapes that a rank holds (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054, section 3); activations follow Korthikanti et al. 2022
(https://arxiv.org/abs/2205.05198, section 4), with ftk's own layers and types; the number of micro-batches in flight
is that of Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ftk.planner.layout import Layout, Workload
from ftk.planner.model_shape import ModelShape

MASTER_BYTES = 4
"""Weights, their gradients and the optimizer's moments are float32 under every `precision`."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the pipeline rank that needs the most, by part; `total` is their sum."""

    parameters: int
    gradients: int
    optimizer_state: int
    average: int
    activations: int
    logits_and_loss: int
    buffers: int
    received: int

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        return asdict(self)


def memory(layout: Layout, shape: ModelShape, work: Workload) -> Memory:
    """Of the pipeline rank that needs the most."""
    return max((rank_memory(layout, shape, work, rank) for rank in candidates(layout)), key=lambda m: m.total)


def candidates(layout: Layout) -> Iterable[int]:
    """Pipeline ranks of which one needs the most: the first ones (most in flight) and the last (the loss)."""
    return sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})


def rank_stages(layout: Layout, shape: ModelShape, rank: int) -> list[tuple[int, int]]:
    """(first layer, last layer + 1) of each stage at one place of the pipeline: stage s is on rank s modulo P."""
    ends = list(accumulate(layout.stage_layers(shape.num_layers)))
    return list(zip([0, *ends], ends, strict=False))[rank :: layout.pipeline]


def rank_memory(layout: Layout, shape: ModelShape, work: Workload, rank: int) -> Memory:
    """Of the processes at one place of the pipeline: those of the first tensor and shard rank, who hold the most.

    Args:
        rank: 0 to P - 1; it holds the stages rank, rank + P, ...
    """
    own = rank_stages(layout, shape, rank)
    local = rank_numel(layout, shape, rank)
    is_first, is_last = own[0][0] == 0, own[-1][1] == shape.num_layers
    of_stage = max(stage_activations(layout, shape, work, stage) for stage in own)
    activations = chunks_in_flight(layout, work, rank) * of_stage
    activations += max(working_layer(layout, shape, work, group) for group in layer_groups(shape, work, own))
    if is_first:
        activations += embedding_activations(layout, shape, work)
    return Memory(
        parameters=MASTER_BYTES * local,
        gradients=MASTER_BYTES * local,
        optimizer_state=round(work.state_bytes * local),
        average=work.average_bytes * local,
        activations=activations,
        logits_and_loss=loss_memory(layout, shape, work) if is_last else 0,
        buffers=buffers(layout, shape, work, rank),
        received=received_bytes(layout, shape, work, rank),
    )


def rank_numel(layout: Layout, shape: ModelShape, rank: int) -> int:
    """Numbers in the parameters that a process at this place of the pipeline keeps."""
    return sum(
        stage_numel(shape, layout.tensor, layout.shard, first, last) for first, last in rank_stages(layout, shape, rank)
    )


@lru_cache(maxsize=4096)
def stage_numel(shape: ModelShape, tensor: int, shard: int, first_layer: int, last_layer: int) -> int:
    """Numbers of a stage's parameters on its first tensor and shard rank."""
    return sum(parameter.padded_numel(tensor, shard) for parameter in shape.of_stage(first_layer, last_layer))


# -- activations ------------------------------------------------------------------------------------------------


class LayerGroup(NamedTuple):
    """Layers that are alike.

    Attributes:
        number: of a stage, or of a process.
        tokens: of a sample, that go through them.
        source: tokens of the encoder, whose states they read besides; 0: none.
    """

    number: int
    tokens: int
    source: int = 0

    @property
    def parts(self) -> int:
        """Of a layer: attention, that to the encoder, feed-forward network."""
        return 3 if self.source else 2


def layer_groups(shape: ModelShape, work: Workload, stages: Iterable[tuple[int, int]]) -> list[LayerGroup]:
    """The layers of stages, as `rank_stages` gives these: those of an encoder, those behind it."""
    stages = list(stages)
    number = sum(last - first for first, last in stages)
    if not shape.encoder_layers:
        return [LayerGroup(number, work.num_tokens)]
    encoder = sum(min(max(0, shape.encoder_layers - first), last - first) for first, last in stages)
    both = LayerGroup(encoder, work.num_tokens), LayerGroup(number - encoder, work.decoder_tokens, work.num_tokens)
    return [group for group in both if group.number]


def stage_activations(layout: Layout, shape: ModelShape, work: Workload, stage: tuple[int, int]) -> int:
    """What a stage keeps of one micro-batch: its layers, and the states of the encoder that all of them read."""
    found = layer_groups(shape, work, [stage])
    states = MASTER_BYTES * layout.batch_size * max(group.source for group in found) * shape.hidden_size
    states //= layout.tensor if layout.sequence_parallel else 1
    return states + sum(group.number * layer_activations(layout, shape, work, group) for group in found)


def layer_activations(layout: Layout, shape: ModelShape, work: Workload, group: LayerGroup) -> int:
    """What one layer keeps of one micro-batch from its forward to its backward pass, with fused attention.

    Bytes per token; v: of the result of a matrix product, r: of the residual path (float32, also under autocast).

    - Cut by sequence parallel: inputs of two norms, 2 H r, with a mean and a deviation each; two dropout masks, 2 H.
    - Whole: the inputs of the joint projection and of the feed-forward network, 2 H v, which are gathered.
    - Cut by tensor parallel: query, key and value, 3 H v; the attended values, H v, with a logarithm for each head; the
      inner width before and after its activation, 2 F v (gated: 4 F v).

    With v = r = 2 and F = 4 H these are the 34 H of Korthikanti et al. A layer that reads an encoder has a third norm,
    input and mask; query and attended values of its second attention, 2 H v; and per token of the encoder keys and
    values, 2 H v, and a copy of the states, H v, unless it reads them as they come, whole and in float32.

    "full" keeps the input of the layer alone, "selective" also the results of matrix products and attention.

    Attention that is not flex has its mask as numbers, T a token, with a bias of positions as many for each head; eager
    attention also the weights of all heads, before and after dropout.
    """
    tokens, source = layout.batch_size * group.tokens, layout.batch_size * group.source
    hidden, heads, width = shape.hidden_size, shape.num_attention_heads, shape.attention_width
    value = work.value_bytes
    inner = shape.inner_size * value / layout.tensor
    sequence_cut = layout.tensor if layout.sequence_parallel else 1
    layer_input = hidden * MASTER_BYTES / sequence_cut  # this and what follows: per token
    if layout.checkpointing == "full":
        return math.ceil(tokens * layer_input)
    attended = (4 * width * value + 4 * heads) / layout.tensor
    attended += (2 * width * value + 4 * heads) / layout.tensor if source else 0
    per_source_token = 2 * width * value / layout.tensor
    mask = 0.0
    if shape.attention != "flex" and shape.has_score_bias:  # a decoder's is of no lengths, and one for all samples
        mask = value * group.tokens * heads / layout.tensor / (layout.batch_size if source else 1)
    elif shape.attention != "flex" and not source:  # a decoder needs none: it is causal
        mask = value * group.tokens
    if shape.attention != "flex":
        mask += value * group.source
    if shape.attention == "eager":
        attended += 2 * heads * (group.tokens + group.source) * value / layout.tensor
    if layout.checkpointing == "selective":
        products = attended + (2 if shape.is_gated else 1) * inner + group.parts * hidden * value
        products += group.parts * hidden * value / sequence_cut if layout.tensor > 1 else 0  # their sums, too
        return math.ceil(tokens * (layer_input + products) + source * per_source_token)
    masks = group.parts * hidden / sequence_cut if shape.has_dropout else 0
    masks += shape.inner_size / layout.tensor if shape.has_inner_dropout else 0
    norms = group.parts * (hidden * MASTER_BYTES + 2 * 4) / sequence_cut
    inputs = group.parts * hidden * value
    if value < MASTER_BYTES or layout.sequence_parallel:
        per_source_token += hidden * value
    per_token = norms + inputs + masks + mask + attended + (4 if shape.is_gated else 2) * inner
    return math.ceil(tokens * per_token + source * per_source_token)


def working_layer(layout: Layout, shape: ModelShape, work: Workload, group: LayerGroup) -> int:
    """What a checkpointed layer takes while it is computed again."""
    if layout.checkpointing == "none":
        return 0
    whole = layer_activations(replace(layout, checkpointing="none"), shape, work, group)
    return max(0, whole - layer_activations(layout, shape, work, group))


def embedding_activations(layout: Layout, shape: ModelShape, work: Workload) -> int:
    """The dropout mask of the summed embeddings, and the sum."""
    tokens = layout.batch_size * (work.num_tokens + work.decoder_tokens)
    return math.ceil(tokens * shape.hidden_size / (layout.tensor if layout.sequence_parallel else 1))


def gather_bytes(layout: Layout, work: Workload) -> int:
    """Of a number of a block's gathered parameter: `weights` auto on a GPU. What is in no block stays float32, and
    so does all where a schedule goes backward in two passes."""
    return work.value_bytes if work.precision == "bf16" and layout.schedule != "zero-bubble" else MASTER_BYTES


def chunks_in_flight(layout: Layout, work: Workload, rank: int) -> int:
    """Forward passes through one stage whose backward pass has not ended, at most.

    1F1B: P - rank (Narayanan et al. 2021, 2.2.1). GPipe: all. Interleaved and zero-bubble: what
    torch.distributed.pipelining warms up with (v stages per rank: (v - 1) P, and twice or once the ranks behind), one
    more, and for the zero bubble those whose weight gradients wait, as many as there are ranks before.
    """
    count = max(1, layout.micro_batches(work.global_batch))
    behind, chunks = layout.pipeline - 1 - rank, layout.stages_per_rank
    if layout.pipeline == 1:
        return 1
    if layout.schedule == "gpipe":
        return count * chunks
    if layout.schedule == "1f1b":
        return min(count, behind + 1)
    rounds = count // max(1, count // layout.pipeline)
    warm_up = (chunks - 1) * rounds + (2 * behind if layout.schedule == "interleaved" else behind + rank)
    return min(count * chunks, warm_up + 1)


# -- loss and messages --------------------------------------------------------------------------------------------


def loss_memory(layout: Layout, shape: ModelShape, work: Workload) -> int:
    """Logits and loss at the places that carry loss, at most `loss_chunk_tokens` at a time: [n, V / T].

    Per number two of float32 (log-probabilities, then their gradient in place) and one in the matrix type; besides the
    normed hidden states [B, T, H] with their gradient, and the float32 gradient of the output matrix that the chunked
    loss makes in its forward, which then becomes the parameter's own.
    """
    targets = work.num_targets(layout.batch_size)
    at_a_time = min(targets, work.loss_chunk_tokens)
    rows = -(-shape.vocab_size // layout.tensor)
    logits = at_a_time * rows * (4 + work.value_bytes)
    tokens = layout.batch_size * work.written_tokens
    hidden = tokens * shape.hidden_size * 4 + targets * shape.hidden_size * (4 + work.value_bytes)
    return logits + hidden + MASTER_BYTES * rows * shape.hidden_size


def buffers(layout: Layout, shape: ModelShape, work: Workload, rank: int) -> int:
    """What the messages of data parallel need: gathered weights, whole gradients; and copies of weights for autocast.

    FSDP2 gathers unit by unit: a block, or what is in none. Under ZeRO-3 two blocks are there at a time (one computes,
    the next is on its way), under ZeRO-2 and 1 all. In the backward pass a unit's gradients are whole, and once more in
    the type of the sum, before they are scattered; ZeRO-1 keeps those of all units whole over the micro-batches of an
    update. DDP's buckets are where the gradients lie. Autocast keeps its copies of float32 weights until the forward
    pass has ended, of what is not checkpointed until the backward pass.
    """
    units = [
        unit_numel(shape, layout.tensor, layout.shard, first, last) for first, last in rank_stages(layout, shape, rank)
    ]
    rest, blocks = sum(unit.rest for unit in units), sum(sum(unit.blocks) for unit in units)
    largest = max(max(unit.blocks) for unit in units)
    block_bytes = gather_bytes(layout, work) if layout.uses_fsdp else MASTER_BYTES
    copies = work.value_bytes * rest if work.value_bytes < MASTER_BYTES else 0
    copies += work.value_bytes * blocks if work.value_bytes < block_bytes else 0
    if not layout.uses_fsdp:
        return copies
    gathered = MASTER_BYTES * rest + block_bytes * (min(blocks, 2 * largest) if layout.zero_stage == 3 else blocks)
    scattered = max((block_bytes + MASTER_BYTES) * largest, 2 * MASTER_BYTES * rest)
    if layout.zero_stage == 1 and layout.micro_batches(work.global_batch) > 1:
        scattered += MASTER_BYTES * (rest + blocks)
    return copies + gathered + scattered


def received_bytes(layout: Layout, shape: ModelShape, work: Workload, rank: int) -> int:
    """Where hidden states from the previous stage and gradients from the next one are received.

    torch.distributed.pipelining makes these places for all micro-batches of an update at once, whatever the schedule.
    """
    if layout.pipeline == 1:
        return 0
    own = rank_stages(layout, shape, rank)
    borders = sum((first > 0) + (last < shape.num_layers) for first, last in own)
    return layout.micro_batches(work.global_batch) * borders * sent_hidden_bytes(layout, shape, work)


def sent_hidden_bytes(layout: Layout, shape: ModelShape, work: Workload) -> int:
    """Of what one stage sends to the next of a micro-batch: float32, with sequence parallel a part of the sequence; of
    an encoder-decoder the states of both stacks."""
    numel = sum(hidden_numel(layout, shape, tokens) for tokens in (work.num_tokens, work.decoder_tokens))
    return MASTER_BYTES * numel // (layout.tensor if layout.sequence_parallel else 1)


def hidden_numel(layout: Layout, shape: ModelShape, tokens: int) -> int:
    """Numbers in the hidden states of a micro-batch, [B, T, H]; T filled up to equal parts of the sequence."""
    if layout.sequence_parallel:
        tokens = -(-tokens // layout.tensor) * layout.tensor
    return layout.batch_size * tokens * shape.hidden_size


class Units(NamedTuple):
    """Numbers in what FSDP2 gathers at once, padded, whole but for tensor parallel."""

    rest: int  # what is in no block
    blocks: tuple[int, ...]


@lru_cache(maxsize=4096)
def unit_numel(
    shape: ModelShape, tensor: int, shard: int, first_layer: int, last_layer: int, tensor_rank: int = 0
) -> Units:
    """Of a stage, on one of its tensor ranks."""
    units: dict[int | None, int] = {}
    for parameter in shape.of_stage(first_layer, last_layer):
        padded = shard * parameter.padded_numel(tensor, shard, tensor_rank)
        units[parameter.block] = units.get(parameter.block, 0) + padded
    rest = units.pop(None, 0)
    return Units(rest, tuple(units.values()))
