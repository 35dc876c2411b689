"""GPT-J: parallel residual paths, and positions that rotate a part of each head."""

from __future__ import annotations

from torch import nn

from ftk.models.rotary.model import RotaryTransformer
from ftk.modules.attention import Attention
from ftk.modules.rotary import Rope
from ftk.modules.transformer_layer import ParallelLayer


class GPTJ(RotaryTransformer):
    """GPT-J (https://github.com/kingoflolz/mesh-transformer-jax); its output layer has a bias."""

    HEAD_BIAS = True
    layer_form = ParallelLayer

    def attention(self) -> nn.Module:
        config = self.config
        return Attention(config.hidden_size, config.num_attention_heads, bias=False, output_bias=False, **self.spread)

    @property
    def rope(self) -> Rope:  # type: ignore[override]
        return Rope(10000.0, self.config.rotary_dim, interleaved=True)
