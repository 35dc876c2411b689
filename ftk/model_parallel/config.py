"""Options of how a model is run: how it is distributed over processes, and what is done to it on each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ftk.config.common import launch_option
from ftk.config.options import option

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class ParallelConfig:
    """The sizes whose product is the number of processes that torchrun starts."""

    RETIRED: ClassVar[dict[str, Any]] = {"powersgd_rank": 1, "powersgd_after_updates": 1000}

    layout: str = option(
        "given",
        "given: the sizes below; auto: the fastest layout of ftk-plan for the processes that are there, "
        "with as many samples per update as `batch_size` x `update_freq` x processes",
        flag="--parallel",
        choices=("given", "auto"),
    )
    tensor_parallel_size: int = option(
        1, "processes that share each layer's matrices (heads, inner width, vocabulary)", min=1, max=10**6
    )
    sequence_parallel: bool = option(
        False,
        "with tensor parallel: norms and dropout each on a share of the sequence, which saves memory",
        needs={"tensor_parallel_size": "> 1"},
    )
    pipeline_parallel_size: int = option(
        1, "processes that each hold consecutive layers; a batch passes through all", min=1, max=10**6
    )
    pipeline_schedule: str = option(
        "1f1b",
        "order in which micro-batches go through the pipeline: 1f1b: forward and backward in turn; gpipe: "
        "all forward, then all backward, which keeps more; interleaved: 1f1b with several stages per process, less "
        "waiting; zero-bubble: gradients of weights are computed while others would wait",
        needs={"pipeline_parallel_size": "> 1"},
        choices=("1f1b", "gpipe", "interleaved", "zero-bubble"),
    )
    pipeline_layers: list[int] = option(
        [],
        "layers of each pipeline stage, first to last, e.g. 6,6,5,7; with several per process stage i "
        "is on process i modulo `pipeline_parallel_size`; default: even, the first stages get what is over",
        needs={"pipeline_parallel_size": "> 1"},
        min=1,
        unit="layers",
    )
    pipeline_stages_per_rank: int | None = option(
        None,
        "stages that each pipeline process holds; default: 2 if interleaved, else 1",
        needs={"pipeline_parallel_size": "> 1"},
        min=1,
    )
    data_parallel_shard_size: int | None = option(
        None,
        "processes that share parameters, gradients and optimizer state of the same layers, each with data of its own "
        "(FSDP, ZeRO); default: what the other sizes leave if `data_parallel_replicate_size` is given, else 1",
        min=1,
        max=10**6,
    )
    data_parallel_replicate_size: int | None = option(
        None,
        "replicas of the model, each with data of its own (DDP, or FSDP2 where another size is above 1); "
        "default: what the other sizes leave",
        min=1,
        max=10**6,
    )
    zero_stage: int | None = option(
        None,
        "what is sharded over `data_parallel_shard_size`: 1: optimizer state; 2: and gradients; 3: and "
        "parameters, each block whole only while it is computed (Rajbhandari et al. 2020); default: 3, in a "
        "pipeline 1. With m micro-batches per update stage 1 sends 2 numbers per parameter, 2 sends 1 + m, 3 sends 3 m",
        choices=(1, 2, 3),
        former_default=3,
    )
    prefetch_blocks: int = option(
        1, "number of blocks whose sharded parameters are gathered ahead", unit="blocks", min=0
    )
    cpu_offload: bool = option(
        False,
        "parameters, gradients and optimizer state stay in the host's memory, where the optimizer "
        "computes; a GPU holds only the blocks that it is computing (FSDP2, also on one process)",
    )
    weights: str = option(
        "auto",
        "type of the weights that the model computes with; the optimizer, averages and checkpoints have "
        "them in fp32. bf16: a copy of them (FSDP2, also on one process); auto: bf16 where parameters are sharded "
        "on GPUs with `precision` bf16, else fp32",
        choices=("auto", "fp32", "bf16"),
    )
    reduce_dtype: str = option(
        "fp32", "type in which sharded gradients are summed over processes", choices=("fp32", "bf16")
    )
    gradient_compression: str = option(
        "none",
        "how replicas exchange gradients: none: in full; bf16: rounded to bfloat16",
        choices=("none", "bf16"),
    )
    find_unused_parameters: bool = option(
        False,
        "each update looks for parameters that had no part in the loss; needed with replicas of a model that "
        "has such parameters, slower for others",
    )
    collective_timeout_minutes: float = option(
        10.0,
        "how long a process waits for another one before it fails; give more if one process alone reads "
        "or compiles something large",
        "(0, 10080]",
        unit="minutes",
    )

    @property
    def needs_fsdp(self) -> bool:
        """Whether an option asks for FSDP2 whatever the number of processes."""
        return self.cpu_offload or self.weights == "bf16"

    def validate(self) -> Iterator[str]:
        yield from self._validate_pipeline()
        yield from self._validate_sharding()
        yield from self._validate_compression()

    def _validate_pipeline(self) -> Iterator[str]:
        stages = self.pipeline_stages_per_rank
        if self.pipeline_parallel_size == 1:
            return
        if self.pipeline_schedule == "interleaved" and stages == 1:
            yield "pipeline_schedule interleaved needs pipeline_stages_per_rank 2 or more; with 1 it is 1f1b"
        elif self.pipeline_schedule in ("1f1b", "gpipe") and (stages or 1) > 1:
            yield (
                f"pipeline_schedule {self.pipeline_schedule} has one stage per process, pipeline_stages_per_rank is "
                f"{stages}; give `pipeline_schedule` interleaved or zero-bubble"
            )

    def _validate_sharding(self) -> Iterator[str]:
        shard = self.data_parallel_shard_size
        one_shard = shard == 1 or (shard is None and self.data_parallel_replicate_size is None)
        if self.zero_stage is not None and one_shard and not self.needs_fsdp:
            yield f"zero_stage {self.zero_stage} shards over processes; give `data_parallel_shard_size` too"

    def _validate_compression(self) -> Iterator[str]:
        sizes = (self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_shard_size or 1)
        if self.gradient_compression != "none" and (max(sizes) > 1 or self.needs_fsdp):
            yield (
                f"gradient_compression {self.gradient_compression} is for replicas of the whole model alone; leave out "
                "the other parallel sizes, `cpu_offload` and `weights`"
            )


@dataclass(kw_only=True)
class InferenceParallelConfig:
    """The sizes whose product is the number of processes."""

    launch: int = launch_option()
    tensor_parallel_size: int = option(
        1, "processes that share each layer's matrices (heads, inner width, vocabulary)", min=1, max=10**6
    )
    pipeline_parallel_size: int = option(1, "processes that each hold consecutive layers", min=1, max=10**6)

    def of_one_model(self) -> ParallelConfig:
        """The sizes of one model: further processes have replicas of it."""
        return ParallelConfig(
            tensor_parallel_size=self.tensor_parallel_size, pipeline_parallel_size=self.pipeline_parallel_size
        )

    def whole(self) -> ParallelConfig:
        """All sizes of the world: every process has a part of the one model."""
        return replace(self.of_one_model(), data_parallel_shard_size=1, data_parallel_replicate_size=1)


@dataclass(kw_only=True)
class EngineConfig:
    """Memory against time, compilation, exactness of the hardware."""

    activation_checkpointing: str = option(
        "none",
        "what the forward pass keeps for the backward pass: none: all; selective: results of matrix "
        "products and attention, the rest is computed again; full: only the input of each block",
        choices=("none", "selective", "full"),
    )
    checkpoint_every: int = option(
        1,
        "activation checkpointing of every N-th block, the first one included",
        needs={"activation_checkpointing": ("selective", "full")},
        unit="blocks",
        min=1,
    )
    compile: str = option(
        "auto",
        "torch.compile: none, block: each block of the model, model: all but the loss, auto: block on CUDA "
        "where the model has blocks, none elsewhere; the start takes seconds to minutes longer, later runs find "
        "the result in a cache (TORCHINDUCTOR_CACHE_DIR)",
        choices=("auto", "none", "block", "model"),
    )
    cuda_graphs: bool = option(
        False,
        "on a GPU, for one process: from the third batch of a size on, the forward and backward passes are replayed as "
        "a CUDA graph, which launches all kernels at once: faster where the host takes longer than the GPU (small "
        "batches and models), for more memory; for 16 sizes at most. Not for models and criterions that decide anew in "
        "each update what they compute; on a CPU without effect",
    )
    residual_precision: str = option(
        "fp32",
        "type of the sums of embeddings and layers' outputs, in models whose layers have their norms in front: fp32, "
        "or same: that of matrix products, which takes less memory and time",
        needs={"precision": ("bf16", "fp16")},
        choices=("fp32", "same"),
    )
    tf32: bool = option(False, "fp32 matrix products on NVIDIA GPUs with 10 bits of mantissa, several times as fast")
    deterministic: bool = option(
        False, "only kernels that give the same bits each time; slower on GPUs, an error without one"
    )

    def compile_on(self, device: torch.device) -> str:
        """`compile` there, of a model that can be compiled."""
        if self.compile != "auto":
            return self.compile
        return "block" if device.type == "cuda" else "none"
