"""RoBERTa (Liu et al. 2019), XLM-RoBERTa (Conneau et al. 2020), CamemBERT (Martin et al. 2020) and their published
sizes, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from ftk.models.encoder.config import PaddedEncoderConfig, register_encoder


@dataclass(kw_only=True)
class RobertaConfig(PaddedEncoderConfig):
    """The shape of a RoBERTa."""


@dataclass(kw_only=True)
class XlmRobertaConfig(RobertaConfig):
    """The same over a SentencePiece vocabulary of a hundred languages."""


@dataclass(kw_only=True)
class CamembertConfig(RobertaConfig):
    """The same over a SentencePiece vocabulary of French."""


register_size = register_encoder("roberta", RobertaConfig, vocab_size=50265, max_positions=512, layer_norm_eps=1e-5)

# not published: for tests and first tries
register_size("roberta_tiny", 4, 64, 4)
register_size("roberta_base", 12, 768, 12)  # 124.7M parameters
register_size("roberta_large", 24, 1024, 16)  # 355.4M

register_xlm_size = register_encoder(
    "xlm_roberta", XlmRobertaConfig, vocab_size=250002, max_positions=512, layer_norm_eps=1e-5
)
register_xlm_size("xlm_roberta_base", 12, 768, 12)  # 278.3M
register_xlm_size("xlm_roberta_large", 24, 1024, 16)  # 560.1M

register_camembert_size = register_encoder(
    "camembert", CamembertConfig, vocab_size=32005, max_positions=512, layer_norm_eps=1e-5
)
register_camembert_size("camembert_base", 12, 768, 12)  # 110.7M
register_camembert_size("camembert_large", 24, 1024, 16)  # 336.7M
