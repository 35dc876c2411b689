"""GLM: a pre-norm transformer that sees its context whole and writes its blanks one token after the other."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor, nn

from ftk.errors import UserError
from ftk.models.base import Backbone
from ftk.models.flops import training_flops
from ftk.models.glm.config import GLMConfig
from ftk.models.glm.parallel import tensor_parallel_plan
from ftk.models.glm.positions import BlockPositionEmbedding, PositionEmbedding, plain_positions
from ftk.modules.attention import Attend
from ftk.modules.dropout import Dropout
from ftk.modules.embeddings import TiedEmbedding
from ftk.modules.initialization import Normal, declare
from ftk.modules.masks import Visibility
from ftk.modules.transformer_layer import TransformerLayer


class GLM(Backbone):
    """Autoregressive blank infilling (Du et al. 2022, https://arxiv.org/abs/2103.10360).

    Inputs: `position_ids`, place in the text and within the blank (None: 0 to T - 1, no blanks); `context_length`,
    leading tokens that all tokens see (None: 0, plain causal attention); `document_ids`, where given a token sees only
    tokens with its own number.

    Args:
        config: the shape.
        seed: of the initial weights; the seed of torch's default generator if None. On the meta device none
            are drawn: after `to_empty`, `init_weights(seed)` gives the very values of direct construction.
    """

    INPUTS: ClassVar[dict[str, str]] = {
        "tokens": "B T",
        "position_ids": "B 2 T",
        "context_length": "B",
        "document_ids": "B T",
    }

    def __init__(self, config: GLMConfig, seed: int | None = None) -> None:
        super().__init__(config)
        std = config.init_std
        positions = BlockPositionEmbedding if config.block_positions else PositionEmbedding
        self.token_embedding = declare(TiedEmbedding(config.vocab_size, config.hidden_size), weight=Normal(std))
        self.position_embedding = positions(config.max_positions, config.hidden_size, std)
        self.embedding_dropout = Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(
                config.hidden_size,
                config.num_attention_heads,
                config.inner_size,
                config.dropout,
                config.layer_norm_eps,
                init_std=std,
                output_std=std / math.sqrt(2.0 * config.num_layers),
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.init_weights(seed)

    def embed(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """tokens [B, T], position_ids [B, 2, T] or None -> [B, T, H]

        Raises:
            UserError: without position_ids, if T is more than max_positions.
        """
        if position_ids is None:
            self._check_length(tokens.size(1))
            position_ids = plain_positions(tokens)
        return self.embedding_dropout(self.token_embedding(tokens) + self.position_embedding(position_ids))

    def attend(
        self, tokens: Tensor, context_length: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Attend:
        """The attention of a whole sequence: tokens [B, T], context_length [B], document_ids [B, T] or None each."""
        return self.sequence_attend(tokens, Visibility(prefix=context_length, documents=document_ids))

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        return self.final_norm(hidden)

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """How processes may share the layers, as data, see `ftk.models.glm.parallel`."""
        return tensor_parallel_plan(self.config)

    def training_flops(self, num_tokens: int, num_targets: int, num_pairs: int) -> int:
        """Operations of a forward and a backward pass, see `ftk.models.flops`."""
        return training_flops(self.config, num_tokens, num_targets, num_pairs)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.config.max_positions:
            raise UserError(
                f"sequence of {num_tokens} tokens, but max_positions is {self.config.max_positions}; "
                "shorten the sequence or build the model with more positions"
            )
