"""The form `modelcenter` of checkpoints with its options, registered here without importing torch: `model_center`."""

from __future__ import annotations

from dataclasses import dataclass

from ftk.config.options import option
from ftk.registry import register_converter


@dataclass(kw_only=True)
class ModelCenterConfig:
    half: bool = option(
        True, "`to`: weights in float16, as the published ones, unless they came in float32; off: float32"
    )


register_converter("modelcenter", config=ModelCenterConfig)("ftk.models.cpm.model_center:ModelCenter")
