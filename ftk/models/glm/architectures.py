"""The published sizes of GLM and their recipes (Du et al. 2022, table 10; config/ds_*.sh of its public code)."""

from __future__ import annotations

from ftk.models.glm.config import GLMConfig
from ftk.registry import Recipe, register_architecture

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


def _recipe(
    lr: float, weight_decay: float, warmup_ratio: float, min_lr_ratio: float, batch_size: int = 16,
    betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-6, lr_scheduler: str = "cosine",
) -> Recipe:  # fmt: skip
    """Published values; the warm-up, in updates there, as a share of the run, and the decay takes the rest of it."""
    return {
        "optimizer": {"_name": "adamw", "lr": lr, "betas": list(betas), "eps": eps, "weight_decay": weight_decay},
        "lr_scheduler": {"_name": lr_scheduler, "warmup_ratio": warmup_ratio, "min_lr_ratio": min_lr_ratio},
        "dataloader": {"batch_size": batch_size},  # per process; published are 1,024 samples an update
    }


_LARGE = _recipe(2e-4, 0.1, 0.04, 0.05)
_BILLIONS = _recipe(1e-4, 0.1, 0.03, 0.1, batch_size=21, betas=(0.9, 0.95), eps=1e-8)


@register_architecture("glm_tiny", model="glm", recipe=_recipe(3e-3, 0.01, 0.05, 0.1, batch_size=8))
def glm_tiny() -> GLMConfig:
    """Not published: for tests and first tries."""
    return _glm(4, 64, 4, 512, BERT_VOCABULARY)


@register_architecture("glm_base", model="glm", recipe=_recipe(4e-4, 0.1, 0.04, 0.05))
def glm_base() -> GLMConfig:
    """110M parameters, English, BERT's word pieces."""
    return _glm(12, 768, 12, 512, BERT_VOCABULARY)


@register_architecture("glm_large", model="glm", recipe=_LARGE)
def glm_large() -> GLMConfig:
    """335M parameters, English, BERT's word pieces."""
    return _glm(24, 1024, 16, 512, BERT_VOCABULARY)


@register_architecture("glm_large_chinese", model="glm", recipe=_recipe(4e-4, 0.01, 0.032, 0.1, batch_size=32))
def glm_large_chinese() -> GLMConfig:
    """356M parameters (335M in name), Chinese SentencePiece."""
    return _glm(24, 1024, 16, 1024, CHINESE_VOCABULARY)


@register_architecture("glm_roberta_large", model="glm", recipe=_recipe(4e-4, 0.01, 0.06, 0.025, lr_scheduler="linear"))
def glm_roberta_large() -> GLMConfig:
    """355M parameters (335M in name), English, RoBERTa's data and byte pairs."""
    return _glm(24, 1024, 16, 512, GPT2_VOCABULARY)


@register_architecture("glm_410m", model="glm", recipe=_LARGE)
def glm_410m() -> GLMConfig:
    """410M parameters, English, token and document objectives."""
    return _glm(30, 1024, 16, 512, BERT_VOCABULARY)


@register_architecture("glm_515m", model="glm", recipe=_LARGE)
def glm_515m() -> GLMConfig:
    """515M parameters, English, token and document objectives."""
    return _glm(30, 1152, 18, 512, BERT_VOCABULARY)


@register_architecture("glm_2b", model="glm", recipe=_BILLIONS)
def glm_2b() -> GLMConfig:
    """2B parameters, English, GPT-2's byte pairs, all three objectives."""
    return _glm(36, 2048, 32, 1024, GPT2_VOCABULARY)


@register_architecture("glm_10b", model="glm", recipe=_BILLIONS)
def glm_10b() -> GLMConfig:
    """10B parameters, English, GPT-2's byte pairs, all three objectives."""
    return _glm(48, 4096, 64, 1024, GPT2_VOCABULARY)


@register_architecture("glm_10b_chinese", model="glm", recipe=_BILLIONS)
def glm_10b_chinese() -> GLMConfig:
    """10B parameters, Chinese SentencePiece, all three objectives."""
    return _glm(48, 4096, 64, 1024, CHINESE_VOCABULARY)
