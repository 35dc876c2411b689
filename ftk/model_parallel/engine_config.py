"""Options of how a model is run, none of which changes what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class EngineConfig:
    """Memory against time, compilation, exactness of the hardware."""

    activation_checkpointing: str = field(
        default="none",
        metadata={
            "help": "what the forward pass keeps for the backward pass: none: all; selective: results of matrix "
            "products and attention, the rest is computed again; full: only the input of each block",
            "choices": ("none", "selective", "full"),
        },
    )
    checkpoint_every: int = field(
        default=1,
        metadata={"help": "activation checkpointing of every so many blocks, the first one included", "unit": "blocks"},
    )
    compile: str = field(
        default="none",
        metadata={
            "help": "torch.compile: none, block: each block of the model, model: all but the loss; the first updates "
            "take seconds to minutes, later runs find the result in a cache (TORCHINDUCTOR_CACHE_DIR)",
            "choices": ("none", "block", "model"),
        },
    )
    tf32: bool = field(
        default=False,
        metadata={"help": "fp32 matrix products on NVIDIA GPUs with 10 bits of mantissa, several times as fast"},
    )
    deterministic: bool = field(
        default=False,
        metadata={"help": "only kernels that give the same bits each time; slower on GPUs, an error without one"},
    )

    def validate(self) -> Iterator[str]:
        if self.checkpoint_every < 1:
            yield f"checkpoint_every is {self.checkpoint_every}; it must be 1 or more"
        if self.checkpoint_every > 1 and self.activation_checkpointing == "none":
            yield (
                f"checkpoint_every is {self.checkpoint_every} without activation checkpointing; "
                f"give --activation-checkpointing too"
            )
