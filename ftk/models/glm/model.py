"""GLM: a pre-norm transformer that sees its context whole and writes its blanks one token after the other."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ftk.models.glm import GLMConfig
from ftk.models.glm.positions import BlockPositionEmbedding, PositionEmbedding
from ftk.models.transformer import Transformer
from ftk.modules.attention import Attend
from ftk.modules.masks import Visibility


class GLM(Transformer):
    """Autoregressive blank infilling (Du et al. 2022, https://arxiv.org/abs/2103.10360).

    Inputs: `position_ids`, place in the text and within the blank (None: 0 to T - 1, no blanks); `context_length`,
    leading tokens that all tokens see (None: 0, plain causal attention); `document_ids`, where given a token sees only
    tokens with its own number; `num_documents`, a number on the host that these are below.

    Args:
        config: the shape.
        seed: of the initial weights, as of `Transformer`.
    """

    INPUTS: ClassVar[dict[str, str]] = {
        "tokens": "B T",
        "position_ids": "B 2 T",
        "context_length": "B",
        "document_ids": "B T",
        "num_documents": "",
    }
    POSITION_TABLES = "position_embedding.*"

    def __init__(self, config: GLMConfig, seed: int | None = None) -> None:
        positions = BlockPositionEmbedding if config.block_positions else PositionEmbedding
        super().__init__(config, positions(config.max_positions, config.hidden_size, config.init_std), seed)

    def default_positions(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> 0 to T - 1 in the text, 0 within a blank, [B, 2, T]"""
        position = super().default_positions(tokens)
        return torch.stack((position, torch.zeros_like(position)), dim=1)

    def attend(  # type: ignore[override]  # each family has its own inputs, which are given by name
        self,
        tokens: Tensor,
        context_length: Tensor | None = None,
        document_ids: Tensor | None = None,
        num_documents: int | None = None,
    ) -> Attend:
        """The attention of a whole sequence: tokens [B, T], context_length [B], document_ids [B, T] or None each."""
        seen = Visibility(prefix=context_length, documents=document_ids, num_documents=num_documents)
        return self.sequence_attend(tokens, seen)
