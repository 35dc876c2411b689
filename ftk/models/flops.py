"""The multiplications of a plain transformer, counted exactly: what FLOP/s and MFU are computed from."""

from __future__ import annotations

from typing import NamedTuple

from ftk.models.config import TransformerConfig
from ftk.models.encoder_decoder.config import EncoderDecoderConfig


def training_flops(config: TransformerConfig, num_tokens: int, num_targets: int, num_pairs: int) -> int:
    """Floating-point operations of the matrix products of a forward and a backward pass.

    Per token and layer: `config.layer_multiplications`. Per pair of query and key and layer: A D for the score, A D
    for the weighted value, masked pairs included, as a dense attention does them. Per target: H V (H the width of
    the embedding), since logits are made only where there is loss.
    Norms, softmax, activations, dropout and embedding look-ups are no matrix products and are not counted, nor is what
    activation checkpointing computes again, so that MFU compares useful work ("model" FLOPs).

    Args:
        config: the shape.
        num_tokens: tokens that go through the layers, padding included.
        num_targets: positions with logits.
        num_pairs: query-key pairs: the sum over sequences of their padded length squared.

    Source: the per-token count of Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473), appendix, with the
    logits at the targets alone.
    """
    width = config.num_attention_heads * config.head_size
    layer = num_tokens * config.layer_multiplications + num_pairs * 2 * width
    multiplications = config.num_layers * layer + num_targets * config.embedding_size * config.vocab_size
    return 6 * multiplications  # a product of [m, k] and [k, n] is 2 m k n operations, and has two in the backward pass


class DecoderWork(NamedTuple):
    """What a decoder does besides its encoder; padding is counted.

    Attributes:
        num_tokens: of the decoder.
        num_pairs: of queries and keys among them.
        num_cross_pairs: of its queries and the encoder's keys.
    """

    num_tokens: int
    num_pairs: int
    num_cross_pairs: int


def encoder_decoder_flops(
    config: EncoderDecoderConfig, num_tokens: int, num_targets: int, num_pairs: int, decoder: DecoderWork
) -> int:
    """The same for an encoder, whose tokens and pairs are given, and a decoder.

    A decoder's layer has besides: queries and outputs of its second attention for each token of its own, keys and
    values for each token of the encoder, and the scores and values of both.
    """
    width = config.num_attention_heads * config.head_size
    encoder_layer = num_tokens * config.layer_multiplications + num_pairs * 2 * width
    decoder_layer = decoder.num_tokens * config.decoder_multiplications
    decoder_layer += (
        num_tokens * 2 * config.hidden_size * width + (decoder.num_pairs + decoder.num_cross_pairs) * 2 * width
    )
    multiplications = config.num_layers * encoder_layer + config.decoder_layers * decoder_layer
    return 6 * (multiplications + num_targets * config.embedding_size * config.vocab_size)
