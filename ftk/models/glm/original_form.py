"""The form of the original's checkpoints with its options, registered here without importing torch: see `original`."""

from __future__ import annotations

from dataclasses import dataclass

from ftk.config.options import option
from ftk.registry import register_converter


@dataclass(kw_only=True)
class OriginalGLMConfig:
    architecture: str | None = option(
        None,
        "`from`: architecture, e.g. glm_large; the original does not store its number of heads",
        flag="--arch",
        metavar="NAME",
    )
    num_attention_heads: int | None = option(None, "`from`: attention heads, if not `arch`", min=1)
    model_parallel_size: int = option(1, "`to`: number of mp_rank_XX files", min=1)
    copy_gmask_row: bool = option(
        False, "`from`, for GLM-10B-Chinese: copy row 50007 to 50009, the [gMASK] of `fix_command_token`"
    )


register_converter("glm", config=OriginalGLMConfig)("ftk.models.glm.original:OriginalGLM")
