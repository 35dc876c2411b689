"""Which layers are on which stage of a pipeline, and which stages on which process; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass

from ftk.errors import UserError
from ftk.model_parallel.config import EngineConfig, ParallelConfig


@dataclass(frozen=True)
class PipelineLayout:
    """Consecutive layers of a model for each stage; stage i is on rank i modulo the number of ranks.

    Each rank has the same number of stages, so that the last stage is on the last rank and never on the first, whose
    stages would otherwise share tied parameters.

    Attributes:
        layers_per_stage: layers of each stage, first to last; each has one or more.
        num_ranks: ranks along the pipeline, 2 or more.
    """

    layers_per_stage: tuple[int, ...]
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_ranks < 2 or self.num_stages % self.num_ranks:
            raise ValueError(f"{self.num_stages} stages on {self.num_ranks} ranks: each rank needs the same number")

    @property
    def num_stages(self) -> int:
        return len(self.layers_per_stage)

    @property
    def num_layers(self) -> int:
        return sum(self.layers_per_stage)

    @property
    def last_rank(self) -> int:
        """The rank with the output layer."""
        return self.num_ranks - 1

    def layers_of(self, stage: int) -> range:
        """The places of a stage's layers in the whole model."""
        begin = sum(self.layers_per_stage[:stage])
        return range(begin, begin + self.layers_per_stage[stage])

    def rank_of(self, stage: int) -> int:
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> range:
        return range(rank, self.num_stages, self.num_ranks)


def pipeline_layout(num_layers: int, config: ParallelConfig) -> PipelineLayout:
    """The layout that the options ask for.

    Raises:
        UserError: the layers cannot be cut in this way, with the numbers.
    """
    size = config.pipeline_parallel_size
    per_rank = config.pipeline_stages_per_rank or (2 if config.pipeline_schedule == "interleaved" else 1)
    num_stages = size * per_rank
    stages = f"`pipeline_parallel_size` {size}" + (f" with {per_rank} stages a process" if per_rank > 1 else "")
    if num_layers == 0:
        raise UserError(f"{stages}: the model has no list of layers to be cut; train it without")
    if config.pipeline_layers:
        given = config.pipeline_layers
        if len(given) != num_stages:
            raise UserError(
                f"`pipeline_layers` {_joined(given)} has {len(given)} stages, {stages} needs {num_stages}; "
                f"give as many numbers"
            )
        if sum(given) != num_layers:
            raise UserError(
                f"`pipeline_layers` {_joined(given)} is {sum(given)} layers, the model has {num_layers}; "
                f"change it, or leave it out"
            )
        return PipelineLayout(tuple(given), size)
    if num_stages > num_layers:
        raise UserError(
            f"{stages} cuts the model into {num_stages} stages, and it has {num_layers} layers; "
            f"{num_layers} stages are possible at most"
        )
    return PipelineLayout(even_layers(num_layers, num_stages), size)


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """As even as possible. The first stages get the rest: the last one computes the output layer as well."""
    each, over = divmod(num_layers, num_stages)
    return tuple(each + (stage < over) for stage in range(num_stages))


NOT_ZERO_BUBBLE = ("selective",)
"""Forms of activation checkpointing that the zero-bubble schedule does not support."""


def check_pipeline(
    config: ParallelConfig, engine: EngineConfig, num_layers: int, update_freq: int, *, shares_bias: bool = False
) -> PipelineLayout:
    """The layout, after a check that schedule, engine and number of micro-batches fit it.

    Args:
        config: with more than one pipeline process.
        update_freq: micro-batches of an update, which are those of the pipeline.
        shares_bias: whether the layers add one bias to their scores (`Backbone.ADDS_BIAS`).

    Raises:
        UserError: they do not, with the numbers.
    """
    layout = pipeline_layout(num_layers, config)
    if engine.compile == "model":
        raise UserError(
            f"`compile` model is for whole models, `pipeline_parallel_size` {config.pipeline_parallel_size} cuts it "
            f"into stages; use `compile` block"
        )
    if config.pipeline_schedule == "zero-bubble":
        _check_zero_bubble(config, engine, shares_bias)
    check_micro_batches(config.pipeline_schedule, layout, update_freq)
    return layout


def _check_zero_bubble(config: ParallelConfig, engine: EngineConfig, shares_bias: bool) -> None:
    """Gradients of inputs and of weights are computed apart, which not everything can."""
    wrong = []
    if engine.compile == "block":
        wrong.append("`compile` block computes gradients of weights together with the others")
    if engine.activation_checkpointing in NOT_ZERO_BUBBLE:
        mode = engine.activation_checkpointing
        wrong.append(f"`activation_checkpointing` {mode} has what it keeps for one pass (use full or none)")
    if wrong:
        raise UserError(
            f"`pipeline_schedule` zero-bubble goes backward through a layer twice, the second time for the weights: "
            f"{', and '.join(wrong)}; leave {'it' if len(wrong) == 1 else 'both'} out, or use `pipeline_schedule` "
            f"interleaved"
        )
    if shares_bias:  # torch 2.13 goes backward through the bias once for each layer, and has freed it after the first
        raise UserError(
            "`pipeline_schedule` zero-bubble runs the backward pass of each layer separately, and the layers of this "
            "model share one position bias; use `pipeline_schedule` 1f1b"
        )
    # FSDP2 brings gradients to the type in which they are summed by a hook that the second pass does not call.
    if "bf16" in (config.weights, config.reduce_dtype):
        raise UserError(
            "`pipeline_schedule` zero-bubble has gradients in fp32 only; leave out `weights` and `reduce_dtype`, "
            "or use `pipeline_schedule` interleaved"
        )


def check_micro_batches(schedule: str, layout: PipelineLayout, count: int) -> None:
    """Check that a schedule can run with this number of micro-batches per update.

    Raises:
        UserError: it cannot; the message says how many it needs.
    """
    if micro_batches_fit(schedule, layout.num_stages, layout.num_ranks, count):
        return
    named = f"`pipeline_schedule` {schedule} over {layout.num_stages} stages"
    if schedule == "1f1b":
        raise UserError(
            f"{named} needs {layout.num_stages} micro-batches per update or more, `update_freq` is {count}; "
            f"use `pipeline_schedule` gpipe, or raise it (with a smaller `batch_size`)"
        )
    ranks = layout.num_ranks
    below, above = max(ranks, count // ranks * ranks), (count // ranks + 1) * ranks
    numbers = f"{below} or {above}" if below != above else f"{below}"
    raise UserError(
        f"{named} on {ranks} processes sends micro-batches in rounds of {ranks}, `update_freq` is {count}; "
        f"use {numbers}"
    )


def micro_batches_fit(schedule: str, num_stages: int, num_ranks: int, count: int) -> bool:
    """Whether a schedule can run with `count` micro-batches per update."""
    if schedule == "gpipe":
        return True
    if schedule == "1f1b":
        return count >= num_stages
    return count >= num_ranks and count % (count // num_ranks) == 0


def _joined(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))
