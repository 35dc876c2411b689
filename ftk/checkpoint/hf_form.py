"""The form `hf` of checkpoints with its options, registered here without importing torch: see `huggingface`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option
from ftk.registry import register_converter

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d{1,9})(KB|MB|GB)")


@dataclass(kw_only=True)
class HuggingFaceConfig:
    max_shard_size: str = option(
        "5GB",
        "`to`: largest file of weights; a model that was converted from this form gets its original files",
        metavar="SIZE",
    )

    def validate(self) -> Iterator[str]:
        if not _SIZE.fullmatch(self.max_shard_size):
            yield f"max_shard_size is {self.max_shard_size!r}; it must be a number with KB, MB or GB, e.g. 5GB"

    @property
    def shard_bytes(self) -> int:
        match = _SIZE.fullmatch(self.max_shard_size)
        assert match is not None, "validated"
        return int(match[1]) * _UNITS[match[2]]


register_converter("hf", config=HuggingFaceConfig)("ftk.checkpoint.huggingface:HuggingFace")
