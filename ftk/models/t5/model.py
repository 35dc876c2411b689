"""T5: an encoder-decoder whose positions are biases of the attention scores, and whose scores are not scaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ftk.models.encoder_decoder.model import EncoderDecoder, Stack
from ftk.modules.attention import Attend, Attention, CrossAttention
from ftk.modules.dropout import Dropout
from ftk.modules.feed_forward import FeedForward, GatedFeedForward
from ftk.modules.initialization import Normal, declare
from ftk.modules.norms import RMSNorm
from ftk.modules.position_bias import BiasedAttention, PositionBias

_SCALE = 1.0
"""Of attention scores; the root of the size of a head is in the initial weights of queries instead."""


class T5(EncoderDecoder):
    """An encoder-decoder (Raffel et al. 2020, https://arxiv.org/abs/1910.10683); inputs as of `EncoderDecoder`.

    Args:
        config: of the family.
        seed: of the initial weights, as of `Transformer`.
    """

    ADDS_BIAS = True

    def add_layers(self) -> None:
        super().add_layers()
        config = self.config
        for name, stack in self.stacks.items():
            buckets, distance = config.num_position_buckets, config.max_position_distance
            table = PositionBias(buckets, config.num_attention_heads, distance, bidirectional=name == "encoder")
            stack.position_bias = declare(table, weight=Normal(self._std(config.hidden_size)))
            stack.final_dropout = Dropout(config.embedding_dropout)

    def add_parts(self) -> None:
        if not self.config.tie_embeddings:
            declare(self.head, weight=Normal(self._std(self.config.hidden_size)))  # type: ignore[type-var]

    def attention(self) -> nn.Module:
        config = self.config
        attention = Attention(config.hidden_size, config.num_attention_heads, **self._attention_options)
        query_std = self._std(config.hidden_size * config.head_size)
        declare(attention.qkv, weight=NarrowQueries(self._std(config.hidden_size), query_std, config.head_size))
        return attention

    def decoder_attention(self) -> nn.Module:
        return self.attention()

    def cross_attention(self) -> nn.Module:
        config = self.config
        attention = CrossAttention(config.hidden_size, config.num_attention_heads, **self._attention_options)
        declare(attention.query, weight=Normal(self._std(config.hidden_size * config.head_size)))
        return attention

    def network(self, inner_size: int) -> nn.Module:
        config = self.config
        shape = (config.hidden_size, inner_size)
        options: dict[str, Any] = {"init_std": self._std(shape[0]), "output_std": self._std(shape[1])}
        options |= {"activation": config.activation, "dropout": config.activation_dropout}
        return GatedFeedForward(*shape, **options) if config.gated else FeedForward(*shape, bias=False, **options)

    def norm(self) -> nn.Module:
        return RMSNorm(self.config.hidden_size, eps=self.config.layer_norm_eps)

    def around(self, position_ids: Tensor, key_positions: Tensor | None = None) -> Callable[[Attend], Attend]:
        """The position bias of the decoder: positions of queries [B or 1, T], of keys [B or 1, S] or None: the same."""
        return self._biased(self.decoder, position_ids, key_positions)

    def around_source(self, position_ids: Tensor) -> Callable[[Attend], Attend]:
        """The position bias of the encoder, whose table is another."""
        return self._biased(self.encoder, position_ids)

    def around_cross(self, attend: Attend) -> Attend:
        """No bias: the source has no place in the decoder's text."""
        return BiasedAttention(attend, None, _SCALE)

    def finish_source(self, hidden: Tensor) -> Tensor:
        """With dropout behind the norm, as the decoder has it: [B, S, H] -> [B, S, H]"""
        stack: Any = self.encoder
        return stack.final_dropout(super().finish_source(hidden))  # type: ignore[no-any-return]

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        stack: Any = self.decoder
        hidden = stack.final_dropout(super().finish(hidden))
        return hidden * self.config.hidden_size**-0.5 if self.config.scale_outputs else hidden

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """That of `EncoderDecoder`, with final dropouts, and columns of the position biases with their heads."""
        bias = {"style": "column", "transposed": True, **self.shared_heads}
        ends: dict[str, Any] = {
            "stacks.decoder.final_norm": "sequence",
            "stacks.encoder.final_dropout": "sequence",
            "stacks.decoder.final_dropout": {"style": "sequence", "gather_output": True},
        }
        return {**super().tensor_parallel_plan, "stacks.*.position_bias": bias, **ends}

    def _biased(self, stack: Stack, queries: Tensor, keys: Tensor | None = None) -> Callable[[Attend], Attend]:
        table: Any = stack.position_bias
        bias = table.between(queries, queries if keys is None else keys)  # once for all layers
        return lambda attend: BiasedAttention(attend, bias, _SCALE)

    def _std(self, inputs: int) -> float:
        """Standard deviation of the initial weights of a matrix by the number of its inputs."""
        return float(self.config.init_std * inputs**-0.5)

    @property
    def _attention_options(self) -> dict[str, Any]:
        config = self.config
        width = config.num_attention_heads * config.head_size
        std = {"init_std": self._std(config.hidden_size), "output_std": self._std(width)}
        return {"head_size": config.head_size, "bias": False, "output_bias": False, **std}


class NarrowQueries(NamedTuple):
    """Initial weights of a joint projection, rows [A, 3, D], whose queries have another standard deviation."""

    std: float
    query_std: float
    head_size: int

    def __call__(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        value = Normal(self.std)(name, shape, seed)
        value.unflatten(0, (-1, 3, self.head_size))[:, 0] *= self.query_std / self.std
        return value
