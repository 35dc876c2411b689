"""GPT-2: a pre-norm transformer whose tokens see what stands before them."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from ftk.models.gpt2 import GPT2Config
from ftk.models.transformer import Transformer
from ftk.modules.initialization import Normal, declare


class GPT2(Transformer):
    """A causal language model with learned positions (Radford et al. 2019).

    Inputs: `position_ids` (None: 0 to T - 1); `document_ids`, where given a token sees only tokens with its own number.

    Args:
        config: the shape.
        seed: of the initial weights, as of `Transformer`.
    """

    INPUTS: ClassVar[dict[str, str]] = {"tokens": "B T", "position_ids": "B T", "document_ids": "B T"}

    def __init__(self, config: GPT2Config, seed: int | None = None) -> None:
        positions = nn.Embedding(config.max_positions, config.hidden_size)
        super().__init__(config, declare(positions, weight=Normal(config.init_std)), seed)

    def add_layers(self) -> None:
        super().add_layers()
        config = self.config
        if config.scale_scores and not config.scale_by_layer:
            return
        for number, layer in enumerate(self.layers, start=1):
            scale = config.head_size**-0.5 if config.scale_scores else 1.0
            layer.attention.scale = scale / (number if config.scale_by_layer else 1)  # type: ignore[union-attr, assignment]
