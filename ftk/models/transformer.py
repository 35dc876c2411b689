"""One stack of transformer layers with an output layer: what all families here share."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.models.base import Backbone
from ftk.models.config import TransformerConfig
from ftk.models.flops import training_flops
from ftk.modules.attention import Attend, Attention
from ftk.modules.dropout import Dropout
from ftk.modules.embeddings import TiedEmbedding
from ftk.modules.feed_forward import FeedForward
from ftk.modules.initialization import Normal, declare
from ftk.modules.masks import Visibility
from ftk.modules.transformer_layer import ParallelLayer, PostNormLayer, TransformerLayer


class Transformer(Backbone):
    """Embeddings of tokens and positions, added; layers of one form; a final norm; the output layer.

    A family gives `INPUTS`, and calls `__init__` with its embedding of positions. It may give another form of layer
    (`layer_form`) or other parts of one (`attention`, `feed_forward`, `norm`), and another `attend`.

    Args:
        config: the shape.
        position_embedding: position_ids -> [B, T, H]; None where `embed` needs none.
        seed: of the initial weights; the seed of torch's default generator if None. On the meta device none are
            drawn: after `to_empty`, `init_weights(seed)` gives the same values as direct construction.
    """

    POSITION_TABLES: ClassVar[str | None] = "position_embedding"
    """Pattern of the modules that hold the tables of positions, for the tensor parallel plan; None: there are none."""

    OUTPUT_LAYER: ClassVar[str] = "head"
    """Name of an output layer of its own; another one in families whose `head` has more parts than it."""

    HEAD_BIAS: ClassVar[bool] = False
    """Whether an output layer of its own has a bias."""

    layer_form: type[TransformerLayer] | type[ParallelLayer] = TransformerLayer
    """Class of the layers (`ftk.modules.transformer_layer`)."""

    def __init__(self, config: TransformerConfig, position_embedding: nn.Module | None, seed: int | None) -> None:
        super().__init__(config)
        normal = Normal(config.init_std)
        embedding = TiedEmbedding if config.tie_embeddings else nn.Embedding
        self.token_embedding = declare(embedding(config.embedding_rows, config.embedding_size), weight=normal)
        if position_embedding is not None:
            self.position_embedding = position_embedding
        self.embedding_dropout = Dropout(config.embedding_dropout)
        self.add_layers()
        if not config.tie_embeddings:
            head = nn.Linear(config.embedding_size, config.vocab_size, bias=self.HEAD_BIAS)
            setattr(self, self.OUTPUT_LAYER, declare(head, weight=normal))  # `Backbone.head` finds it
        self.add_parts()
        self.init_weights(seed)

    def add_layers(self) -> None:
        """Makes the layers and the norm behind them."""
        config = self.config
        self.layers = nn.ModuleList(
            self.layer_form(self.attention(), self.feed_forward(), self.norm, config.dropout, config.depth_drop(place))
            for place in range(config.num_layers)
        )
        for layer, window in zip(self.layers, config.layer_windows, strict=True):
            layer.attention.window = window  # type: ignore[union-attr, assignment]
        self.final_norm = nn.Identity() if issubclass(self.layer_form, PostNormLayer) else self.norm()

    def add_parts(self) -> None:
        """Makes the parts that a family has besides; their initial values are drawn with all others."""

    @property
    def spread(self) -> dict[str, Any]:
        """Standard deviations of the initial weights of a layer's parts (Radford et al. 2019, 2.3)."""
        std = self.config.init_std
        return {"init_std": std, "output_std": std / math.sqrt(2.0 * self.config.num_layers)}

    def attention(self) -> nn.Module:
        """A layer's attention."""
        return Attention(self.config.hidden_size, self.config.num_attention_heads, **self.spread)

    def feed_forward(self) -> nn.Module:
        """A layer's feed-forward network."""
        return FeedForward(
            self.config.hidden_size, self.config.inner_size, activation=self.config.activation, **self.spread
        )

    def norm(self) -> nn.Module:
        """A norm of a layer, or the final one."""
        return nn.LayerNorm(self.config.hidden_size, eps=self.config.layer_norm_eps)

    def attend(self, tokens: Tensor, document_ids: Tensor | None = None) -> Attend:
        """The attention of a whole sequence: tokens [B, T], document_ids [B, T] or None."""
        return self.sequence_attend(tokens, Visibility(documents=document_ids))

    def embed(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """tokens [B, T], position_ids in the shape of `INPUTS`, or None for `default_positions` -> [B, T, H]

        Without tables of positions `position_ids` are for `around` alone.

        Raises:
            UserError: without position_ids, if there are tables and T is more than max_positions.
        """
        if self.POSITION_TABLES is None:
            return self.embedding_dropout(self.embed_tokens(tokens))
        if position_ids is None:
            self.check_length(tokens)
            position_ids = self.default_positions(tokens)
        hidden = self.embed_tokens(tokens)
        return self.embedding_dropout(hidden + self.position_embedding(position_ids).to(hidden.dtype))

    def check_length(self, tokens: Tensor) -> None:
        """Raises UserError if T of [B, T] is more than max_positions."""
        num_tokens, max_positions = tokens.size(1), self.config.max_positions
        if num_tokens > max_positions:
            raise UserError(
                f"sequence of {num_tokens} tokens, but max_positions is {max_positions}; "
                "shorten the sequence or build the model with more positions"
            )

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> [B, T, H]"""
        return self.token_embedding(tokens)

    def default_positions(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> 0 to T - 1 in each row, [B, T]"""
        return torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        return self.final_norm(hidden)

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """How ranks may share the layers, as data: `ftk.model_parallel.tensor_parallel.plan`.

        As Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053): each rank has a part of the vocabulary, of the
        heads and of the inner width; a layer has two sums in its forward and two in its backward pass.
        """
        config = self.config
        positions = {self.POSITION_TABLES: {"style": "sequence", "scatter_input": True}} if self.POSITION_TABLES else {}
        return {
            "token_embedding": "vocab_embedding",
            **positions,
            "embedding_dropout": "sequence",
            **self.layers_plan("layers.*"),
            **{f"layers.*.attention.{name}": "sharded" for name in self._norms_of_heads()},
            "final_norm": {"style": "sequence", "gather_output": True},
            **({} if config.tie_embeddings else {self.OUTPUT_LAYER: "vocab_output"}),
        }

    def _norms_of_heads(self) -> list[str]:
        """Names in a layer's attention: every rank has the norm whole, and some of the heads."""
        attentions = [getattr(layer, "attention", None) for layer in self.layers]
        return [
            name for name in ("query_norm", "key_norm") if any(hasattr(attention, name) for attention in attentions)
        ]

    def layers_plan(self, layer: str, heads: dict[str, Any] | None = None) -> dict[str, str | dict[str, Any]]:
        """The part of the plan for a list of layers; `layer`: pattern of their names; `heads`: None: `shared_heads`."""
        config, heads = self.config, self.shared_heads if heads is None else heads
        return {
            **{f"{layer}.{name}": "sequence" for name in self.layer_form.NORMS},
            f"{layer}.attention": {"style": "sharded", "own_random": config.attention_dropout > 0.0},
            f"{layer}.attention.qkv": {"style": "column", **heads},
            f"{layer}.attention.output": {"style": "row", **heads},
            f"{layer}.feed_forward.inner": "column",
            **({f"{layer}.feed_forward.gate": "column"} if config.gated else {}),
            f"{layer}.feed_forward.output": "row",
            f"{layer}.dropout": "sequence",
        }

    @property
    def shared_heads(self) -> dict[str, Any]:
        """Of the plan: what of an attention is shared as a whole."""
        config = self.config
        name = "attention heads" if config.kv_heads == config.num_attention_heads else "key heads"
        return {"units": config.kv_heads, "unit_name": name}

    def training_flops(self, num_tokens: int, num_targets: int, num_pairs: int) -> int:
        """Operations of a forward and a backward pass: `ftk.models.flops`."""
        return training_flops(self.config, num_tokens, num_targets, num_pairs)
