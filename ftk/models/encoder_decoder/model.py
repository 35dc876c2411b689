"""An encoder and a decoder that reads it: what T5 and the families after Vaswani et al. (2017) share."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from ftk.models.encoder_decoder.config import EncoderDecoderConfig
from ftk.models.flops import DecoderWork, encoder_decoder_flops
from ftk.models.transformer import Transformer
from ftk.modules.attention import Attend, Attention, CrossAttend, CrossAttention, Encoded
from ftk.modules.feed_forward import FeedForward
from ftk.modules.masks import Visibility
from ftk.modules.transformer_layer import DecoderLayer, PostNormLayer


class Stack(nn.Module):
    """The layers of the encoder or of the decoder, and the norm behind them. A family may add parts."""

    def __init__(self, layers: nn.ModuleList, final_norm: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.final_norm = final_norm
        self.last_layer = str(len(layers) - 1)

    @property
    def ends_here(self) -> bool:
        """Whether it has its last layer, which may be on another stage of a pipeline."""
        return self.last_layer in self.layers._modules


class EncoderDecoder(Transformer):
    """An encoder of the source, and a decoder whose layers read its states.

    Inputs: `tokens`, the source; `decoder_tokens`, what the decoder reads; `lengths`, tokens of each source that are no
    padding (None: all). Both stacks lie in one `nn.ModuleDict`, so that what goes by blocks finds all layers.

    A family may give other parts of a layer (`attention`, `decoder_attention`, `cross_attention`, `network`, `norm`),
    the embedding of either side (`embedded`) and what it puts around attention (`around` the decoder's,
    `around_source`, `around_cross`).

    Args:
        config: of the family.
        seed: of the initial weights, as of `Transformer`.
    """

    INPUTS: ClassVar[dict[str, str]] = {"tokens": "B S", "lengths": "B", "decoder_tokens": "B T"}
    TAKES_INPUTS = ("hidden_states",)
    POSITION_TABLES = None

    decoder_layer_form: type[DecoderLayer] = DecoderLayer
    """Class of the decoder's layers; `layer_form` is that of the encoder's."""

    def __init__(self, config: EncoderDecoderConfig, seed: int | None = None) -> None:
        super().__init__(config, None, seed)

    def add_layers(self) -> None:
        config = self.config
        count = config.decoder_layers
        encoder = [
            self.layer_form(self.attention(), self.feed_forward(), self.norm, config.dropout, config.depth_drop(place))
            for place in range(config.num_layers)
        ]
        decoder = [
            self.decoder_layer_form(
                self.decoder_attention(),
                self.cross_attention(),
                self.network(config.decoder_inner_size),
                self.norm,
                config.dropout,
                config.depth_drop(place, count),
            )
            for place in range(count)
        ]
        self.stacks = nn.ModuleDict(
            {
                name: Stack(nn.ModuleList(layers), nn.Identity() if self.is_post_norm else self.norm())
                for name, layers in (("encoder", encoder), ("decoder", decoder))
            }
        )

    @property
    def is_post_norm(self) -> bool:
        """Whether the norms stand behind the sums, so that a stack needs none behind its layers."""
        return issubclass(self.layer_form, PostNormLayer)

    def cross_attention(self) -> nn.Module:
        """A layer's attention to the encoder's states."""
        return CrossAttention(self.config.hidden_size, self.config.decoder_heads, **self.spread)

    def decoder_attention(self) -> nn.Module:
        """The attention among the tokens of a layer of the decoder."""
        return Attention(self.config.hidden_size, self.config.decoder_heads, **self.spread)

    def feed_forward(self) -> nn.Module:
        """The feed-forward network of a layer of the encoder."""
        return self.network(self.config.inner_size)

    def network(self, inner_size: int) -> nn.Module:
        """A feed-forward network of some inner width."""
        config, options = self.config, {"activation": self.config.activation, **self.spread}
        return FeedForward(config.hidden_size, inner_size, dropout=config.activation_dropout, **options)

    @property
    def encoder(self) -> Stack:
        """The stack that reads the source."""
        return self.stacks["encoder"]  # type: ignore[return-value]

    @property
    def decoder(self) -> Stack:
        """The stack that writes."""
        return self.stacks["decoder"]  # type: ignore[return-value]

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """Those of the decoder, which are called as `layer(hidden, attend)` with a `CrossAttend`."""
        return self.decoder.layers

    @property
    def all_layers(self) -> list[nn.Module]:
        """Those of the encoder that are here, and behind them those of the decoder."""
        return [*self.encoder.layers, *self.decoder.layers]

    def forward(  # type: ignore[override]
        self, tokens: Tensor, decoder_tokens: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """What the head makes of every place of the decoder, [B, T, V]; arguments as of `hidden_states`."""
        return super().forward(tokens, decoder_tokens=decoder_tokens, lengths=lengths)

    def hidden_states(  # type: ignore[override]
        self, tokens: Tensor, decoder_tokens: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """What the head reads.

        Args:
            tokens: the source, [B, S] int64.
            decoder_tokens: [B, T] int64.
            lengths: tokens of each source that are no padding, [B] int64; None: all.

        Returns:
            the decoder's states, [B, T, H]
        """
        return super().hidden_states(tokens, decoder_tokens=decoder_tokens, lengths=lengths)

    def enter(self, tokens: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
        """What the first layers of the encoder and of the decoder read: [B, S, H] and [B, T, H]"""
        return self.embedded(self.encoder, tokens), self.embed(inputs["decoder_tokens"])

    def run_stage(self, states: tuple[Tensor, ...], tokens: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
        """The layers of both stacks that are here, all or those of a stage: [B, S, H] and [B, T, H] -> the same"""
        source, hidden = states
        lengths = inputs.get("lengths")
        if self.encoder.layers:
            source = self.run_encoder(source, tokens, lengths)
        if self.decoder.layers:
            attend = self.attend(inputs["decoder_tokens"], source, tokens.size(1), lengths)
            hidden = self.run_layers(hidden, attend)
        return source, hidden

    def encode(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """What the decoder's layers read: tokens [B, S], lengths [B] or None -> [B, S, H]"""
        return self.run_encoder(self.embedded(self.encoder, tokens), tokens, lengths)

    def run_encoder(self, hidden: Tensor, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The encoder's layers that are here, and behind the last one its norm.

        Args:
            hidden: [B, S, H].
            tokens: the source, [B, S].
            lengths: as of `hidden_states`.

        Returns:
            [B, S, H]
        """
        positions = self.default_positions(tokens[:1])
        attend = self.around_source(positions)(self.sequence_attend(tokens, Visibility(causal=False, length=lengths)))
        hidden = self.run_layers(hidden, attend, self.encoder.layers)
        return self.finish_source(hidden) if self.encoder.ends_here else hidden

    def embed(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """What the decoder's first layer reads: tokens of the decoder and their positions [B, T] -> [B, T, H]"""
        return self.embedded(self.decoder, tokens, position_ids)

    def embedded(self, stack: Stack, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """tokens [B, T], position_ids [B, T] or None for 0 to T - 1 -> [B, T, H]"""
        return self.embedding_dropout(self.embed_tokens(tokens))

    def attend(  # type: ignore[override]
        self, tokens: Tensor, states: Tensor, source_length: int, lengths: Tensor | None = None
    ) -> CrossAttend:
        """What the decoder's layers are given for whole sequences.

        Args:
            tokens: of the decoder, [B, T].
            states: of the encoder, [B, S, H].
            source_length: S.
            lengths: as of `hidden_states`.
        """
        own = self.around(self.default_positions(tokens[:1]))(self.sequence_attend(tokens, Visibility()))
        cross = self.sequence_attend(tokens, Visibility(causal=False, length=lengths), source_length)
        return CrossAttend(own, self.around_cross(cross), Encoded(states))

    def around_source(self, position_ids: Tensor) -> Any:
        """As `around`, for the encoder's layers: position_ids [1, S]."""
        return self.around(position_ids)

    def around_cross(self, attend: Attend) -> Attend:
        """What a family puts around the attention to the encoder's states; here nothing."""
        return attend

    def finish_source(self, hidden: Tensor) -> Tensor:
        """What comes behind the encoder's last layer: [B, S, H] -> [B, S, H]"""
        return self.encoder.final_norm(hidden)

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        return self.decoder.final_norm(hidden)

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """That of `Transformer` for both stacks; the attention between them is shared by heads, too."""
        config, cross = self.config, "stacks.decoder.layers.*.cross_attention"
        heads: dict[str, Any] = {"units": config.decoder_heads, "unit_name": "attention heads"}
        return {
            "token_embedding": "vocab_embedding",
            "embedding_dropout": "sequence",
            **self.layers_plan("stacks.encoder.layers.*"),
            **self.layers_plan("stacks.decoder.layers.*", heads),
            "stacks.*.layers.*.feed_forward.dropout": "sharded",
            f"{cross}_norm": "sequence",
            cross: {"style": "sharded", "own_random": config.attention_dropout > 0.0},
            f"{cross}.query": {"style": "column", **heads},
            f"{cross}.key_value": {"style": "column", **heads},
            f"{cross}.output": {"style": "row", **heads},
            "stacks.encoder.final_norm": "sequence",
            "stacks.decoder.final_norm": {"style": "sequence", "gather_output": True},
            **({} if config.tie_embeddings else {self.OUTPUT_LAYER: "vocab_output"}),
        }

    def training_flops(self, num_tokens: int, num_targets: int, num_pairs: int, decoder: DecoderWork) -> int:  # type: ignore[override]
        """Operations of a forward and a backward pass: `ftk.models.flops`; `decoder`: what the decoder does."""
        return encoder_decoder_flops(self.config, num_tokens, num_targets, num_pairs, decoder)
