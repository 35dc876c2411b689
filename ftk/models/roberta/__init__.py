"""RoBERTa (Liu et al. 2019) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftk.models.encoder.config import EncoderConfig, register_encoder


@dataclass(kw_only=True)
class RobertaConfig(EncoderConfig):
    """The shape of a RoBERTa."""

    type_vocab_size: int = field(
        default=1, metadata={"min": 1, "max": 10**6, "help": "number of token types (segments)"}
    )
    pad_token: int = field(  # type: ignore[misc]
        default=1,
        metadata={
            "min": 0,
            "help": "padding token: it gets no position; positions start at pad_token + 1",
        },
    )


register_size = register_encoder("roberta", RobertaConfig, vocab_size=50265, max_positions=512, layer_norm_eps=1e-5)

# not published: for tests and first tries
register_size("roberta_tiny", 4, 64, 4)
register_size("roberta_base", 12, 768, 12)  # 124.7M parameters
register_size("roberta_large", 24, 1024, 16)  # 355.4M
