"""Options of a plan: what an update does, and which layouts are considered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option, required
from ftk.planner.layout import Workload


@dataclass(kw_only=True)
class WorkConfig:
    """What an update does."""

    global_batch_size: int = required(
        "samples of an update, over all GPUs", daily=True, min=1, max=10**9, unit="samples"
    )
    seq_length: int | None = option(
        None, "of a sample, padding included; default: `max_positions`", daily=True, min=1, unit="tokens"
    )
    target_length: int | None = option(
        None,
        "what the decoder of an encoder-decoder reads of a sample; default: of the architecture's usual task",
        daily=True,
        min=1,
        unit="tokens",
    )
    loss_share: float | None = option(
        None,
        "share of the positions in a batch that count in the loss; default: of the architecture's usual task",
        "(0, 1]",
    )
    vocab_size: int | None = option(
        None, "rows of the token embedding, padding included; the architecture's if not given", min=1
    )
    precision: str = option(
        "bf16", "of matrix products, over fp32 weights", daily=True, choices=("fp32", "bf16", "fp16")
    )
    ema: bool = option(False, "a moving average of the weights is kept (`ema_decay`)", daily=True)
    matmul_efficiency: float = option(0.65, "of a GPU's peak, what its matrix products reach", "(0, 1]")

    def build(self, max_positions: int, state_bytes: float, loss_share: float, decoder_tokens: int = 0) -> Workload:
        """The work of an update.

        Args:
            max_positions: of the model.
            state_bytes: of the optimizer per parameter.
            loss_share: where none is given.
            decoder_tokens: of an encoder-decoder, where no `target_length` is given.
        """
        return Workload(
            global_batch=self.global_batch_size,
            num_tokens=self.seq_length or max_positions,
            loss_share=self.loss_share or loss_share,
            precision=self.precision,
            state_bytes=state_bytes,
            average_bytes=4 if self.ema else 0,
            decoder_tokens=(self.target_length or decoder_tokens) if decoder_tokens else 0,
        )


@dataclass(kw_only=True)
class LimitsConfig:
    """The layouts to consider: all possible ones, restricted by what is given here."""

    tensor_parallel_size: int | None = option(None, "only this T", min=1)
    pipeline_parallel_size: int | None = option(None, "only this P", min=1)
    data_parallel_shard_size: int | None = option(None, "only this S", min=1)
    data_parallel_replicate_size: int | None = option(None, "only this R", min=1)
    sequence_parallel: bool | None = option(None, "only with it, or only without it")
    zero_stage: int | None = option(None, "this alone, where S is above 1", choices=(1, 2, 3))
    activation_checkpointing: str | None = option(None, "this alone", choices=("none", "selective", "full"))
    batch_size: int | None = option(None, "micro-batches of this size alone", min=1, unit="samples")
    pipeline_schedule: str = option(
        "1f1b", "of pipelines, as in ftk-train", choices=("1f1b", "gpipe", "interleaved", "zero-bubble")
    )
    pipeline_stages_per_rank: int | None = option(
        None, "stages that each pipeline process holds; default: 2 if interleaved, else 1", min=1
    )

    def validate(self) -> Iterator[str]:
        stages = self.pipeline_stages_per_rank
        if stages is not None and stages > 1 and self.pipeline_schedule in ("1f1b", "gpipe"):
            yield (
                f"pipeline_stages_per_rank: pipeline_schedule {self.pipeline_schedule} has one stage per process, not "
                f"{stages}; use interleaved"
            )
        if self.pipeline_schedule == "interleaved" and stages == 1:
            yield "pipeline_schedule interleaved needs pipeline_stages_per_rank 2 or more"

    @property
    def stages_per_rank(self) -> int:
        return self.pipeline_stages_per_rank or (2 if self.pipeline_schedule == "interleaved" else 1)
