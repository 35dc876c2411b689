"""Options of how a model that generates is spread over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class InferenceParallelConfig:
    """The sizes whose product is the number of processes that torchrun starts."""

    tensor_parallel_size: int = field(
        default=1,
        metadata={"max": 10**6, "help": "processes that share each layer's matrices (heads, inner width, vocabulary)"},
    )
    pipeline_parallel_size: int = field(
        default=1, metadata={"max": 10**6, "help": "processes that each hold a stretch of the layers"}
    )

    def validate(self) -> Iterator[str]:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be 1 or more"
