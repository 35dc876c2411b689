"""The form `modelcenter` of checkpoints with its options, registered here without importing torch: `model_center`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftk.config.options import option
from ftk.registry import register_converter

if TYPE_CHECKING:
    from ftk.models.cpm.model_center import ModelCenter


@dataclass(kw_only=True)
class ModelCenterConfig:
    half: bool = option(
        True, "`to`: weights in float16, as the published ones, unless they came in float32; off: float32"
    )


@register_converter("modelcenter", config=ModelCenterConfig)
def model_center(config: ModelCenterConfig) -> ModelCenter:
    """`ModelCenter(config)`: see there."""
    from ftk.models.cpm.model_center import ModelCenter

    return ModelCenter(config)
