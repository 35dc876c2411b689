"""BERT (Devlin et al. 2019) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from ftk.models.encoder.config import EncoderConfig, register_encoder


@dataclass(kw_only=True)
class BertConfig(EncoderConfig):
    """The shape of a BERT."""


register_size = register_encoder("bert", BertConfig, vocab_size=30522, max_positions=512, layer_norm_eps=1e-12)

# not published: for tests and first tries
register_size("bert_tiny", 4, 64, 4)
register_size("bert_base", 12, 768, 12)  # 109.5M parameters
register_size("bert_large", 24, 1024, 16)  # 335.2M
register_size("bert_base_cased", 12, 768, 12, vocab_size=28996)
register_size("bert_large_cased", 24, 1024, 16, vocab_size=28996)
register_size("bert_base_chinese", 12, 768, 12, vocab_size=21128)
register_size("bert_base_multilingual", 12, 768, 12, vocab_size=119547)
