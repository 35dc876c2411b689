"""GLM: a pre-norm transformer that sees its context whole and writes its blanks one token after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.models.flops import training_flops
from ftk.models.glm.config import GLMConfig
from ftk.models.glm.parallel import tensor_parallel_plan
from ftk.modules.attention import SequenceAttention, attention_form, sequence_attention
from ftk.modules.dropout import Dropout
from ftk.modules.embeddings import BlockPositionEmbedding, PositionEmbedding, TiedEmbedding, plain_positions
from ftk.modules.heads import Head, TiedVocabulary
from ftk.modules.initialization import normal_values
from ftk.modules.masks import Visibility
from ftk.modules.precision import matmul_dtype
from ftk.modules.transformer_layer import TransformerLayer


class GLM(nn.Module):
    """Autoregressive blank infilling (Du et al. 2022, https://arxiv.org/abs/2103.10360).

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
        super().__init__()
        self.config = config
        positions = BlockPositionEmbedding if config.block_positions else PositionEmbedding
        self.token_embedding = TiedEmbedding(config.vocab_size, config.hidden_size)
        self.position_embedding = positions(config.max_positions, config.hidden_size)
        self.embedding_dropout = Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(
                config.hidden_size,
                config.num_attention_heads,
                config.inner_size,
                config.dropout,
                config.layer_norm_eps,
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.init_weights(seed)

    def forward(
        self,
        tokens: Tensor,
        *,
        position_ids: Tensor | None = None,
        context_length: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Scores of the next token at every place.

        Args:
            tokens: [B, T] int64.
            position_ids: [B, 2, T] int64, place in the text and within the blank; None: 0 to T-1, no blanks.
            context_length: [B] int64, leading tokens that all tokens see; None: 0, plain causal attention.
            document_ids: [B, T] int64, where given a token sees only tokens with its own number.

        Returns:
            logits [B, T, V].

        Raises:
            UserError: without position_ids, if T is more than max_positions.
        """
        hidden = self.hidden_states(
            tokens, position_ids=position_ids, context_length=context_length, document_ids=document_ids
        )  # [B, T, H]
        return self.logits(hidden)

    def hidden_states(
        self,
        tokens: Tensor,
        *,
        position_ids: Tensor | None = None,
        context_length: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """What the output layer reads, [B, T, H]; arguments as in `forward`."""
        hidden = self.embed(tokens, position_ids)  # [B, T, H]
        attend = self.attend(tokens, context_length, document_ids)
        for layer in self.layers:
            hidden = layer(hidden, attend)
        return self.final_norm(hidden)

    def embed(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """tokens [B, T], position_ids [B, 2, T] or None -> [B, T, H]"""
        if position_ids is None:
            self._check_length(tokens.size(1))
            position_ids = plain_positions(tokens)
        return self.embedding_dropout(self.token_embedding(tokens) + self.position_embedding(position_ids))

    def attend(
        self, tokens: Tensor, context_length: Tensor | None = None, document_ids: Tensor | None = None
    ) -> SequenceAttention:
        """The attention of a whole sequence: tokens [B, T], context_length [B], document_ids [B, T] or None each."""
        config = self.config
        num_tokens = tokens.size(1)
        head_size = config.hidden_size // config.num_attention_heads
        # The first is a norm's; matrices may be quantised. And every stage of a pipeline has a layer.
        dtype = matmul_dtype(next(self.layers.parameters()))
        form = attention_form(config.attention, tokens.device, dtype, num_tokens, head_size, config.attention_dropout)
        dropout = config.attention_dropout if self.training else 0.0
        visibility = Visibility(prefix=context_length, documents=document_ids)
        return sequence_attention(form, visibility, num_tokens, tokens.device, dropout, dtype)

    @property
    def head(self) -> Head:
        """The output layer; made on access, since quantisation takes another embedding's place."""
        return TiedVocabulary(self.token_embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """The output layer: hidden [..., H] -> [..., V]"""
        return self.head(hidden)

    @property
    def output_weight(self) -> Tensor:
        """The matrix of the output layer, [V, H], which is that of the token embedding."""
        return self.token_embedding.weight

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """How processes may share the layers, as data, see `ftk.models.glm.parallel`."""
        return tensor_parallel_plan(self.config)

    def training_flops(self, num_tokens: int, num_targets: int, num_pairs: int) -> int:
        """Operations of a forward and a backward pass, see `ftk.models.flops`."""
        return training_flops(self.config, num_tokens, num_targets, num_pairs)

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Draws all weights anew; parameters on the meta device are left alone.

        Args:
            seed: the seed of torch's default generator if None.
        """
        seed = torch.initial_seed() if seed is None else seed
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(self.initial_value(name, parameter.shape, seed))

    def initial_value(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        """The whole initial value of one parameter, float32 on the CPU: a function of its arguments alone.

        N(0, init_std), divided by sqrt(2 L) in layers that write into the residual path; biases 0, norms 1.
        """
        if name.endswith(".bias"):
            return torch.zeros(tuple(shape), device="cpu")
        if name.endswith("norm.weight"):
            return torch.ones(tuple(shape), device="cpu")
        shrink = math.sqrt(2.0 * self.config.num_layers) if name.endswith(".output.weight") else 1.0
        return normal_values(name, shape, self.config.init_std / shrink, seed)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.config.max_positions:
            raise UserError(
                f"sequence of {num_tokens} tokens, but max_positions is {self.config.max_positions}; "
                "shorten the sequence or build the model with more positions"
            )
