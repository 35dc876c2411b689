"""A parallel layout: how a run is distributed over processes, and which layouts are impossible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ftk.model_parallel.pipeline.layout import NOT_ZERO_BUBBLE, even_layers, micro_batches_fit
from ftk.planner.model_shape import ModelShape, chunk_size

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Workload:
    """What an update does, whatever it is spread over.

    Attributes:
        global_batch: samples of an update.
        num_tokens: of a sample, padding included; of an encoder-decoder those that the encoder reads.
        loss_share: of the places, those that carry loss.
        precision: fp32, or bf16 or fp16 over fp32 weights.
        state_bytes: of the optimizer per parameter, without weight and gradient.
        loss_chunk_tokens: targets whose logits exist at a time.
        average_bytes: 4 where a moving average of the weights is kept.
        decoder_tokens: of a sample of an encoder-decoder those that the decoder reads; 0 of one stack.
    """

    global_batch: int
    num_tokens: int
    loss_share: float = 0.18
    precision: str = "bf16"
    state_bytes: float = 8.0
    loss_chunk_tokens: int = 1024
    average_bytes: int = 0
    decoder_tokens: int = 0

    @property
    def written_tokens(self) -> int:
        """Of a sample, those that the output layer may read."""
        return self.decoder_tokens or self.num_tokens

    @property
    def value_bytes(self) -> int:
        """Of a number that a matrix product makes."""
        return BYTES[self.precision]

    def num_targets(self, samples: int) -> int:
        return max(1, round(self.loss_share * samples * self.written_tokens))


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh and what else decides about memory, messages and time.

    Attributes:
        tensor, pipeline, replicate, shard: T, P, R, S.
        batch_size: samples of a micro-batch.
        sequence_parallel: norms and dropout on a share of the sequence.
        zero_stage: 1, 2 or 3; of importance where S > 1.
        checkpointing: none, selective or full.
        schedule: of the pipeline: 1f1b, gpipe, interleaved or zero-bubble.
        stages_per_rank: of the pipeline, more than 1 for interleaved schedules.
    """

    tensor: int = 1
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    batch_size: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 3
    checkpointing: str = "none"
    schedule: str = "1f1b"
    stages_per_rank: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.replicate * self.shard

    @property
    def data(self) -> int:
        return self.replicate * self.shard

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.stages_per_rank

    @property
    def uses_fsdp(self) -> bool:
        """Whether data parallel is FSDP2: DDP replicates models that are whole on each process, nothing else."""
        return self.shard > 1 or (self.replicate > 1 and (self.tensor > 1 or self.pipeline > 1))

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of an update on each data rank."""
        return global_batch // (self.data * self.batch_size)

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each stage."""
        return even_layers(num_layers, self.num_stages)

    def flags(self, work: Workload) -> str:
        """The flags of ftk-train for this layout and its updates, without architecture and optimizer."""
        flags = [f"--tensor-parallel-size {self.tensor}", f"--pipeline-parallel-size {self.pipeline}"]
        flags += [f"--data-parallel-replicate-size {self.replicate}", f"--data-parallel-shard-size {self.shard}"]
        flags += ["--sequence-parallel"] if self.sequence_parallel else []
        flags += [f"--zero-stage {self.zero_stage}"] if self.shard > 1 else []
        flags += [f"--pipeline-schedule {self.schedule}"] if self.pipeline > 1 else []
        flags += [f"--pipeline-stages-per-rank {self.stages_per_rank}"] if self.stages_per_rank > 1 else []
        flags += [f"--activation-checkpointing {self.checkpointing}"] if self.checkpointing != "none" else []
        flags += [f"--batch-size {self.batch_size}"]
        count = self.micro_batches(work.global_batch)
        flags += [f"--update-freq {count}"] if count > 1 else []
        return " ".join([f"--seq-length {work.num_tokens} --precision {work.precision}", *flags])


class MeshPlace(NamedTuple):
    """A place in the mesh: data ranks of one shard rank count as one."""

    pipeline: int = 0
    tensor: int = 0
    shard: int = 0


FIRST_PLACE = MeshPlace()
"""Of every dimension the first, which holds the most wherever something does not divide."""


class Conflict(NamedTuple):
    """Why a layout cannot run: in general, and with its numbers."""

    reason: str
    numbers: str


def conflicts(layout: Layout, shape: ModelShape, work: Workload) -> Iterator[Conflict]:
    """All reasons why a layout cannot run, memory apart."""
    tensor, stages = layout.tensor, layout.num_stages
    if tensor > 1 and not shape.has_tensor_plan:
        yield Conflict("the model has no plan for tensor parallel", f"T {tensor}")
    elif shape.num_attention_heads % tensor:
        yield Conflict(f"T does not divide {shape.num_attention_heads} attention heads", f"T {tensor}")
    elif shape.inner_size % tensor:
        yield Conflict(f"T does not divide the inner width {shape.inner_size}", f"T {tensor}")
    elif chunk_size(shape.vocab_size, tensor, tensor - 1) < 1:
        yield Conflict(f"T leaves ranks without any of {shape.vocab_size} rows of the vocabulary", f"T {tensor}")
    if layout.pipeline > 1 and not shape.has_stages:
        yield Conflict("the model has no pipeline stages that can be planned", f"P {layout.pipeline}")
    elif stages > shape.num_layers:
        yield Conflict(f"more pipeline stages than {shape.num_layers} layers", f"{stages}")
    if layout.sequence_parallel and tensor == 1:
        yield Conflict("sequence parallel needs T above 1", "T 1")
    elif layout.sequence_parallel and not shape.has_sequence_parallel:
        yield Conflict("the model cannot be trained by sequence parallel", f"T {tensor}")
    if work.global_batch % layout.data:
        yield Conflict(f"R x S does not divide the {work.global_batch} samples of an update", f"{layout.data}")
        return
    samples = work.global_batch // layout.data
    if samples % layout.batch_size:
        yield Conflict("micro-batches do not divide the samples of a data rank", f"{layout.batch_size} of {samples}")
    elif layout.pipeline > 1:
        yield from _schedule_conflicts(layout, samples // layout.batch_size)


def _schedule_conflicts(layout: Layout, count: int) -> Iterator[Conflict]:
    """As ftk-train would refuse them (`ftk.model_parallel.pipeline.layout.check_pipeline`)."""
    if layout.schedule == "zero-bubble" and layout.checkpointing in NOT_ZERO_BUBBLE:
        yield Conflict(f"zero-bubble with {layout.checkpointing} checkpointing", f"P {layout.pipeline}")
    if layout.shard > 1 and (stage := layout.zero_stage) > 1:
        whole = "whole gradients" if stage == 2 else "whole parameters"
        yield Conflict(f"ZeRO-{stage} in a pipeline, which keeps {whole} until an update ends", f"P {layout.pipeline}")
    if micro_batches_fit(layout.schedule, layout.num_stages, layout.pipeline, count):
        return
    if layout.schedule == "1f1b":
        yield Conflict("fewer micro-batches than pipeline stages", f"{count} for {layout.num_stages}")
    else:
        numbers = f"{count} for P {layout.pipeline}"
        yield Conflict(f"micro-batches in no whole rounds, which {layout.schedule} needs", numbers)
