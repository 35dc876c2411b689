"""One update of a small model by the real engine and what it sends, and what the planner says of the same."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from ftk.batch import Batch
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.gradients import gradient_sync
from ftk.model_parallel.parallelize import parallelize_training
from ftk.model_parallel.pipeline.build import build_pipeline
from ftk.model_parallel.pipeline.runner import PipelineRunner
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import World
from ftk.models.bart import BartConfig
from ftk.models.bart.model import BART
from ftk.models.encoder_decoder.config import EncoderDecoderConfig
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from ftk.models.llama import LlamaConfig
from ftk.models.rotary.model import RotaryDecoder
from ftk.models.t5 import T5Config
from ftk.models.t5.model import T5
from ftk.planner.communication import traffic
from ftk.planner.layout import Layout, MeshPlace, Workload
from ftk.planner.model_shape import ModelShape, model_shape
from tests import dense
from tests.model_parallel.count_messages import CountMessages, Message
from tests.model_parallel.small_steps import VOCAB, small_config

TOKENS = 16
DECODER_TOKENS = 12  # of encoder-decoders
TARGETS = 4  # of each sample
CHUNK = 6  # targets whose logits exist at a time, in the chunked form of the loss


def config_of(**changes: Any) -> GLMConfig:
    """4 layers, hidden 32, 4 heads, an uneven vocabulary."""
    return small_config(**{"num_layers": 4, "max_positions": 30, **changes})


def two_stacks(kind: type[Any], **changes: Any) -> Any:
    """The same of an encoder-decoder, with one layer more in the decoder; no dropout within feed-forward networks."""
    shape = {"vocab_size": VOCAB, "num_layers": 2, "num_decoder_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
    no_dropout = dict.fromkeys(("embedding_dropout", "attention_dropout", "activation_dropout", "dropout"), 0.0)
    own = {"head_dim": 12, "ffn_hidden_size": 128} if kind is T5Config else {}  # heads that together are wider than H
    return kind(**{**shape, "max_positions": 30, **no_dropout, **own, **changes})


def llama(**changes: Any) -> LlamaConfig:
    """A model of one stack with gated networks; no dropout."""
    shape = {"vocab_size": VOCAB, "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
    return LlamaConfig(**{**shape, "ffn_hidden_size": 128, "max_positions": 30, **changes})


def build(config: Any) -> nn.Module:
    """On the meta device."""
    with torch.device("meta"):
        return {GLMConfig: GLM, BartConfig: BART, T5Config: T5, LlamaConfig: RotaryDecoder}[type(config)](config, 1)


def shape_of(config: Any) -> ModelShape:
    """Made once for equal options: it takes longer than an update."""
    if (key := repr(config)) not in _SHAPES:
        _SHAPES[key] = model_shape(build(config), config)
    return _SHAPES[key]


_SHAPES: dict[str, ModelShape] = {}


def work_of(layout: Layout, micro_batches: int, config: Any = None, **changes: Any) -> Workload:
    """So many micro-batches on each data rank."""
    if isinstance(config, EncoderDecoderConfig):
        changes = {"decoder_tokens": DECODER_TOKENS, "loss_share": TARGETS / DECODER_TOKENS, **changes}
    values: dict[str, Any] = {"loss_share": TARGETS / TOKENS, "precision": "fp32", "loss_chunk_tokens": CHUNK}
    samples = layout.data * layout.batch_size * micro_batches
    return Workload(samples, TOKENS, **{**values, **changes})


def batch_of(config: Any, samples: int, tokens: int = TOKENS, targets: int = TARGETS) -> Batch:
    places = torch.arange(tokens)
    if isinstance(config, EncoderDecoderConfig):
        drawn = torch.randint(config.vocab_size, (3, samples, tokens), generator=torch.Generator().manual_seed(1))
        return dense.batch_of(
            {
                "tokens": drawn[0],
                "lengths": torch.full((samples,), tokens - 3),
                "decoder_tokens": drawn[1, :, :DECODER_TOKENS],
                "targets": drawn[2, :, :DECODER_TOKENS],
                "loss_mask": (places[:DECODER_TOKENS] >= DECODER_TOKENS - targets).expand(samples, -1),
            }
        )
    drawn = torch.randint(config.vocab_size, (2, samples, tokens), generator=torch.Generator().manual_seed(1))
    of_glm = {
        "position_ids": torch.stack((places, places // 3)).expand(samples, -1, -1).contiguous(),
        "context_length": torch.full((samples,), tokens - targets),
    }
    return dense.batch_of(
        {
            "tokens": drawn[0],
            "targets": drawn[1],
            "loss_mask": (places >= tokens - targets).expand(samples, -1),
            **(of_glm if isinstance(config, GLMConfig) else {}),
        }
    )


def parallel_of(layout: Layout) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        data_parallel_replicate_size=layout.replicate,
        data_parallel_shard_size=layout.shard,
        sequence_parallel=layout.sequence_parallel,
        zero_stage=layout.zero_stage if layout.shard > 1 else 3,
        pipeline_schedule=layout.schedule,
        pipeline_stages_per_rank=layout.stages_per_rank if layout.stages_per_rank > 1 else None,
    )


class Updated(NamedTuple):
    """What one update leaves."""

    messages: Counter[Message]
    model: nn.Module  # with its gradients
    received_bytes: int = 0  # places for what comes from other stages


def update(
    world: World,
    layout: Layout,
    config: Any,
    micro_batches: int,
    loss_form: str = "plain",
    watch: AbstractContextManager[Any] | None = None,
) -> Updated:
    """One update by the real engine, its messages counted; `watch` is open in that update, not while all is built."""
    torch.manual_seed(0)
    model = build(config)
    criterion = CrossEntropy(CrossEntropyConfig(loss_form=loss_form, loss_chunk_tokens=CHUNK))
    engine = EngineConfig(activation_checkpointing=layout.checkpointing)
    batches = [batch_of(config, layout.batch_size)] * micro_batches
    if layout.pipeline > 1:
        runner = build_pipeline(model, criterion, world, parallel_of(layout), engine, update_freq=micro_batches, seed=1)
        own = runner.part.model.train()
        runner.forward_backward(batches, torch.ones(()))  # torch's stages tell each other shapes in the first one
        own.zero_grad()
        with watch or nullcontext(), CountMessages() as counted:
            runner.forward_backward(batches, torch.ones(()))
        return Updated(counted.counts, own, received_bytes(runner))
    parallelized = parallelize_training(StepModule(model, criterion), world, parallel_of(layout), engine, seed=1)
    called = parallelized.module
    model.train()
    if isinstance(called, nn.parallel.DistributedDataParallel):  # it sorts its buckets after the first, in the second
        for _ in range(2):
            called(batches[0]).loss.backward()
        model.zero_grad(set_to_none=False)
    with watch or nullcontext(), CountMessages() as counted:
        for place, batch in enumerate(batches, start=1):
            with gradient_sync(called, enabled=place == micro_batches):
                called(batch).loss.backward()
        for finish in parallelized.finishers:
            finish()
    return Updated(counted.counts, model)


def received_bytes(runner: PipelineRunner) -> int:
    """Of torch's stages, for the one shape of micro-batches that there was."""
    [schedule] = runner._schedules.values()
    places = [
        info.buffer
        for stage in schedule._stages
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for info in infos
        if getattr(info, "buffer", None) is not None  # none for a first stage; before torch 2.13 no attribute
    ]
    return sum(place.nbytes for place in places)


def planned(layout: Layout, shape: ModelShape, work: Workload, place: MeshPlace) -> Counter[Message]:
    """The planner's messages in the form of counted ones."""
    found: Counter[Message] = Counter()
    for one in traffic(layout, shape, work, place):
        found[Message(one.collective, getattr(layout, one.dimension), one.message_bytes)] += one.count
    return found


def place_of(world: World) -> MeshPlace:
    return MeshPlace(world.pipeline_rank, world.tensor_rank, world.coordinate("shard"))
