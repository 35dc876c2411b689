"""GLM-4-0414: GLM-4 with norms behind attention and feed-forward network, too."""

from __future__ import annotations

from ftk.models.rotary.model import RotaryDecoder
from ftk.modules.transformer_layer import SandwichLayer


class GLM4x0414(RotaryDecoder):
    """LLaMA's form with four norms in a layer."""

    layer_form = SandwichLayer
