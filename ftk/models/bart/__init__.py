"""BART (Lewis et al. 2020) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from ftk.config.options import option
from ftk.models.config import activation_option, register_family, tie_option
from ftk.models.encoder_decoder.config import FreeDecoderConfig
from ftk.registry import Recipe


@dataclass(kw_only=True)
class BartConfig(FreeDecoderConfig):
    """The shape of a BART and its dropout."""

    activation: str = activation_option("gelu")  # type: ignore[misc]
    tie_embeddings: bool = tie_option(True)  # type: ignore[misc]
    scale_embeddings: bool = option(False, "multiply token embeddings by the root of hidden_size")
    attention_dropout: float = option(0.0, "dropout of attention weights", "[0, 1)")
    logits_bias: bool = option(False, "add to the logits a bias that is not trained, as some published files have")

    @property
    def first_position_row(self) -> int:
        """Row of position 0 in the tables of positions; published files have those before it, once for padding."""
        return 2


def _recipe(hidden_size: int) -> Recipe:
    """RoBERTa's values, with which BART was pretrained; for width 64, of first tries, a larger rate and short texts."""
    lr = 3e-3 if hidden_size <= 64 else 6e-4 if hidden_size <= 768 else 4e-4
    return {
        "optimizer": {"_name": "adamw", "lr": lr, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.01},
        "lr_scheduler": {"_name": "linear", "warmup_ratio": 0.06},
        **({"task": {"_name": "denoising", "seq_length": 128}} if hidden_size <= 64 else {}),
    }


register_size = register_family(
    "bart",
    BartConfig,
    "ftk.models.bart.model:BART",
    task="denoising",
    recipe=_recipe,
    vocab_size=50265,
    max_positions=1024,
)

register_size("bart_tiny", 2, 64, 4)  # not published: for tests and first tries
register_size("bart_base", 6, 768, 12)  # 139.4M parameters
register_size("bart_large", 12, 1024, 16)  # 406.3M
