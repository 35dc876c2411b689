"""The form `megatron` of checkpoints with its options, registered here without importing torch: see `reader`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ftk.config.options import option
from ftk.registry import register_converter


@dataclass(kw_only=True)
class MegatronConfig:
    is_written: ClassVar[bool] = False

    num_attention_heads: int | None = option(
        None, "`from`: attention heads, for old files that hold no options", min=1, max=10**5
    )


register_converter("megatron", config=MegatronConfig)("ftk.checkpoint.megatron.reader:Megatron")
