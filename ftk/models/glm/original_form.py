"""The form of the original's checkpoints with its options, registered here without importing torch: see `original`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftk.registry import register_converter

if TYPE_CHECKING:
    from ftk.models.glm.original import OriginalGLM


@dataclass(kw_only=True)
class OriginalGLMConfig:
    architecture: str | None = field(
        default=None,
        metadata={
            "flag": "--arch",
            "help": "`from`: architecture, e.g. glm_large; the original does not store its number of heads",
            "metavar": "NAME",
        },
    )
    num_attention_heads: int | None = field(default=None, metadata={"help": "`from`: attention heads, if not `arch`"})
    model_parallel_size: int = field(default=1, metadata={"help": "`to`: number of mp_rank_XX files"})
    copy_gmask_row: bool = field(
        default=False,
        metadata={"help": "`from`, for GLM-10B-Chinese: copy row 50007 to 50009, the [gMASK] of `fix_command_token`"},
    )

    def validate(self) -> Iterator[str]:
        if self.num_attention_heads is not None and self.num_attention_heads < 1:
            yield f"num_attention_heads is {self.num_attention_heads}; it must be at least 1"
        if self.model_parallel_size < 1:
            yield f"model_parallel_size is {self.model_parallel_size}; it must be at least 1"


@register_converter("glm", config=OriginalGLMConfig)
def original_glm(config: OriginalGLMConfig) -> OriginalGLM:
    """`OriginalGLM(config)`: see there."""
    from ftk.models.glm.original import OriginalGLM

    return OriginalGLM(config)
