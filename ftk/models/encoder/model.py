"""Encoders: bidirectional transformers with an output layer for masked tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ftk.models.encoder.config import EncoderConfig
from ftk.models.transformer import Transformer
from ftk.modules.attention import Attend
from ftk.modules.embeddings import TiedEmbedding
from ftk.modules.feed_forward import ACTIVATIONS
from ftk.modules.heads import logits_of
from ftk.modules.initialization import Normal, declare
from ftk.modules.masks import Visibility
from ftk.modules.transformer_layer import PostNormLayer


class Encoder(Transformer):
    """A bidirectional post-norm transformer (Devlin et al. 2019).

    Inputs: `lengths`, tokens of each row that are no padding (None: all); `token_types` (None: 0).

    Args:
        config: of the family.
        seed: of the initial weights, as of `Transformer`.
    """

    INPUTS: ClassVar[dict[str, str]] = {"tokens": "B T", "lengths": "B", "token_types": "B T"}
    STARTS_AS: ClassVar[dict[str, str | None]] = {"lm_head.pooler.": None, "lm_head.next_sentence.": None}
    OUTPUT_LAYER = "output_layer"
    layer_form = PostNormLayer

    def __init__(self, config: EncoderConfig, seed: int | None = None) -> None:
        positions = nn.Embedding(config.position_rows, config.hidden_size)
        super().__init__(config, declare(positions, weight=Normal(config.init_std)), seed)

    def add_parts(self) -> None:
        config = self.config
        types = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.type_embedding = declare(types, weight=Normal(config.init_std))
        self.embedding_norm = self.norm()
        self.lm_head = MaskedLMHead(config)

    @property
    def spread(self) -> dict[str, Any]:
        """Standard deviations of the initial weights of a layer's parts: one (Devlin et al. 2019)."""
        return {"init_std": self.config.init_std, "output_std": self.config.init_std}

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, **inputs: Any) -> Tensor:
        """As of `Backbone`: tokens [B, T], lengths [B] or None, others by name -> [B, T, V]"""
        return super().forward(tokens, lengths=lengths, **inputs)

    def attend(self, tokens: Tensor, lengths: Tensor | None = None) -> Attend:  # type: ignore[override]
        """The attention of whole texts: tokens [B, T], lengths [B] or None."""
        return self.sequence_attend(tokens, Visibility(causal=False, length=lengths))

    def embed(self, tokens: Tensor, token_types: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """tokens, token_types [B, T] -> [B, T, H]

        Raises:
            UserError: T is more than max_positions.
        """
        self.check_length(tokens)
        types = torch.zeros_like(tokens) if token_types is None else token_types
        positions = self.position_embedding(self.default_positions(tokens))
        embedded = self.embed_tokens(tokens) + self.type_embedding(types) + positions
        return self.embedding_dropout(self.embedding_norm(embedded))

    def default_positions(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> rows of the table, [B, T]"""
        pad = self.config.pad_token
        if pad is None:
            return super().default_positions(tokens)
        counts = tokens != pad
        return pad + counts.cumsum(-1) * counts

    @property
    def head(self) -> MaskedVocabulary:  # type: ignore[override]
        """The output layer: a network of its own, then the token embedding or another matrix."""
        output: Any = self.token_embedding if self.config.tie_embeddings else self.output_layer
        return MaskedVocabulary(self.lm_head, output)

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """That of `Transformer`; the network in front of the output layer is whole on every rank."""
        return {
            **super().tensor_parallel_plan,
            "type_embedding": {"style": "sequence", "scatter_input": True},
            "embedding_norm": "sequence",
            "lm_head": "replicated",
            "lm_head.*": "replicated",
        }


class MaskedLMHead(nn.Module):
    """What stands between an encoder and its vocabulary, and the vocabulary's bias.

    With `next_sentence` also an output that reads a text's first token: [follows, does not].
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size, normal = config.hidden_size, Normal(config.init_std)
        self.dense = declare(nn.Linear(size, size), weight=normal)
        self.activation = ACTIVATIONS[config.head_activation]
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        if config.next_sentence:
            self.pooler = declare(nn.Linear(size, size), weight=normal)
            self.next_sentence = declare(nn.Linear(size, 2), weight=normal)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        return self.norm(self.activation(self.dense(hidden)))

    def follows(self, hidden: Tensor) -> Tensor:
        """hidden [B, H] of the first tokens -> [B, 2]"""
        return self.next_sentence(torch.tanh(self.pooler(hidden)))


class MaskedVocabulary(NamedTuple):
    """The output layer of an encoder: no single matrix, so that `weight` is None."""

    own: MaskedLMHead
    output: TiedEmbedding | nn.Linear

    @property
    def weight(self) -> None:
        """None, see `ftk.modules.heads.Head`."""

    @property
    def next_sentence(self) -> Callable[[Tensor], Tensor] | None:
        """Hidden states of first tokens [B, H] -> scores [B, 2] of following and not; None: the model has none."""
        return self.own.follows if hasattr(self.own, "pooler") else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> logits [..., V]"""
        return logits_of(self.output, self.own(hidden)) + self.own.bias
