"""The published sizes of GLM (Du et al. 2022, table 10, and the configurations of its public code)."""

from __future__ import annotations

from ftk.models.glm.config import GLMConfig
from ftk.registry import register_architecture

# Padded vocabularies; `vocab_size` is taken from the tokenizer where there is one.
BERT_VOCABULARY = 30592
GPT2_VOCABULARY = 50304
CHINESE_VOCABULARY = 50048


def _glm(num_layers: int, hidden_size: int, num_heads: int, max_positions: int, vocab_size: int) -> GLMConfig:
    return GLMConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        max_positions=max_positions,
        vocab_size=vocab_size,
    )


@register_architecture("glm_tiny", model="glm")
def glm_tiny() -> GLMConfig:
    """Not published: for tests and first tries."""
    return _glm(4, 64, 4, 512, BERT_VOCABULARY)


@register_architecture("glm_base", model="glm")
def glm_base() -> GLMConfig:
    """110M parameters, English, BERT's word pieces."""
    return _glm(12, 768, 12, 512, BERT_VOCABULARY)


@register_architecture("glm_large", model="glm")
def glm_large() -> GLMConfig:
    """335M parameters, English, BERT's word pieces."""
    return _glm(24, 1024, 16, 512, BERT_VOCABULARY)


@register_architecture("glm_large_chinese", model="glm")
def glm_large_chinese() -> GLMConfig:
    """356M parameters (335M in name), Chinese SentencePiece."""
    return _glm(24, 1024, 16, 1024, CHINESE_VOCABULARY)


@register_architecture("glm_roberta_large", model="glm")
def glm_roberta_large() -> GLMConfig:
    """355M parameters (335M in name), English, RoBERTa's data and byte pairs."""
    return _glm(24, 1024, 16, 512, GPT2_VOCABULARY)


@register_architecture("glm_410m", model="glm")
def glm_410m() -> GLMConfig:
    """410M parameters, English, token and document objectives."""
    return _glm(30, 1024, 16, 512, BERT_VOCABULARY)


@register_architecture("glm_515m", model="glm")
def glm_515m() -> GLMConfig:
    """515M parameters, English, token and document objectives."""
    return _glm(30, 1152, 18, 512, BERT_VOCABULARY)


@register_architecture("glm_2b", model="glm")
def glm_2b() -> GLMConfig:
    """2B parameters, English, GPT-2's byte pairs, all three objectives."""
    return _glm(36, 2048, 32, 1024, GPT2_VOCABULARY)


@register_architecture("glm_10b", model="glm")
def glm_10b() -> GLMConfig:
    """10B parameters, English, GPT-2's byte pairs, all three objectives."""
    return _glm(48, 4096, 64, 1024, GPT2_VOCABULARY)


@register_architecture("glm_10b_chinese", model="glm")
def glm_10b_chinese() -> GLMConfig:
    """10B parameters, Chinese SentencePiece, all three objectives."""
    return _glm(48, 4096, 64, 1024, CHINESE_VOCABULARY)
