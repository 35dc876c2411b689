"""GLM (Du et al. 2022), registered here without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.models.glm.config import GLMConfig
from ftk.registry import register_model

if TYPE_CHECKING:
    from ftk.models.glm.model import GLM


@register_model("glm", config=GLMConfig, task="glm_blank")
def build_glm(config: GLMConfig, seed: int | None = None) -> GLM:
    """`GLM(config, seed)`: see there."""
    from ftk.models.glm.model import GLM

    return GLM(config, seed)
