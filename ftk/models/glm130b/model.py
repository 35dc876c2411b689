"""GLM-130B and ChatGLM-6B: GLM's masks and blanks, rotary positions, DeepNorm's residual path."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ftk.models.glm.model import GLM
from ftk.models.glm130b import RotaryGLMConfig
from ftk.models.transformer import Transformer
from ftk.modules.attention import Attend
from ftk.modules.feed_forward import GatedFeedForward
from ftk.modules.rotary import Rope, RotaryAttention
from ftk.modules.transformer_layer import DeepNormLayer


class RotaryGLM(GLM):
    """What the two families share; inputs as of `GLM`.

    Without 2-D positions each head is rotated by the place in the text; with them its first half is, and its second
    half by the place within the blank.

    Args:
        config: the shape.
        seed: of the initial weights, as of `Transformer`.
    """

    POSITION_TABLES = None  # type: ignore[assignment]

    layer_form = DeepNormLayer

    def __init__(self, config: RotaryGLMConfig, seed: int | None = None) -> None:
        Transformer.__init__(self, config, None, seed)

    def add_layers(self) -> None:
        super().add_layers()
        for layer in self.layers:
            layer.scale = math.sqrt(2 * self.config.residual_layers)  # type: ignore[assignment]

    def around(self, position_ids: Tensor, key_positions: Tensor | None = None) -> Callable[[Attend], Attend]:
        """The rotation of queries and keys at their places, int64 [B, 2, T], or [B, T] outside of blanks."""
        config = self.config
        if position_ids.dim() == 2:
            position_ids = torch.stack((position_ids, torch.zeros_like(position_ids)), dim=1)
        # The published code keeps the frequencies in float16; its angles are as exact as the type of the activations.
        rope = Rope(10000.0, config.head_size // 2 if config.block_positions else config.head_size, half=True)
        cos, sin = rope.tables(position_ids if config.block_positions else position_ids[:, 0])
        return lambda attend: RotaryAttention(attend, cos, sin, rope.interleaved)


class GLM130B(RotaryGLM):
    """GLM-130B (Zeng et al. 2023, https://arxiv.org/abs/2210.02414), whose feed-forward networks are gated."""

    def feed_forward(self) -> nn.Module:
        config = self.config
        return GatedFeedForward(
            config.hidden_size, config.inner_size, activation=config.activation, bias=True, **self.spread
        )


class ChatGLM(RotaryGLM):
    """ChatGLM-6B, the first ChatGLM (https://github.com/zai-org/ChatGLM-6B)."""
