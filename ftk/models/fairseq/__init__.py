"""The Transformer of Vaswani et al. (2017) as fairseq has it, and fairseq's sizes, registered here without importing
torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option
from ftk.models.config import activation_option, register_family
from ftk.models.encoder_decoder.config import FreeDecoderConfig
from ftk.registry import Recipe


@dataclass(kw_only=True)
class FairseqTransformerConfig(FreeDecoderConfig):
    """The shape of a Transformer for translation and its dropout."""

    activation: str = activation_option("relu")  # type: ignore[misc]
    share_embeddings: str = option(
        "all",
        "what is one matrix: all (source, target, output layer), decoder (target, output layer), none",
        choices=("all", "decoder", "none"),
    )
    source_vocab_size: int | None = option(
        None,
        "rows of the source's embedding, padding included; vocab_size where sources have no tokenizer of their own",
        min=1,
        max=10**8,
        unit="tokens",
        derived=True,
    )
    norm_first: bool = option(False, "norms before attention and feed-forward network; else after the sums")
    scale_embeddings: bool = option(True, "multiply token embeddings by the root of hidden_size")
    first_position: int = option(
        2, "number of the first place; fairseq's follows the id of the padding token, 1", min=0, max=10**8
    )
    attention_dropout: float = option(0.0, "dropout of attention weights", "[0, 1)")
    init_std: float = option(
        1.0,
        "standard deviation of the initial token embedding times the root of hidden_size, and a factor on "
        "all others, which follow from the widths of their matrices",
        "(0, inf)",
    )

    @property
    def tie_embeddings(self) -> bool:  # type: ignore[override]
        """Whether the target's embedding is the output layer too."""
        return self.share_embeddings != "none"

    @property
    def position_limit(self) -> None:
        """Waves have no end."""

    @property
    def source_rows(self) -> int:
        """Rows of the source's embedding."""
        return self.vocab_size if self.source_vocab_size is None else self.source_vocab_size

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.hidden_size < 4:
            yield f"hidden_size is {self.hidden_size}; waves of positions need at least 4"
        if self.share_embeddings == "all" and self.source_rows != self.vocab_size:
            yield f"source_vocab_size is {self.source_vocab_size}; with share_embeddings all it is vocab_size"


def _recipe(hidden_size: int) -> Recipe:
    """fairseq's translation examples: Adam and the inverse root of Vaswani et al. (2017), label smoothing.

    For width 64, of first tries, a larger rate and a shorter warm-up.
    """
    tiny = hidden_size <= 64
    return {
        "optimizer": {"_name": "adam", "lr": 3e-3 if tiny else 5e-4, "betas": [0.9, 0.98], "eps": 1e-9},
        "lr_scheduler": {
            "_name": "inverse_sqrt",
            **({"warmup_ratio": 0.05} if tiny else {"warmup_updates": 4000, "warmup_init_lr": 1e-7}),
        },
        "criterion": {"_name": "cross_entropy", "label_smoothing": 0.1},
    }


register_size = register_family(
    "transformer",
    FairseqTransformerConfig,
    "ftk.models.fairseq.model:FairseqTransformer",
    task="translation",
    recipe=_recipe,
    vocab_size=32768,
    max_positions=1024,
)

register_size("transformer_tiny", 2, 64, 2, 64)  # fairseq's tiny one, for tests and first tries
register_size(
    "transformer_iwslt_de_en", 6, 512, 4, 1024, share_embeddings="decoder", dropout=0.3, embedding_dropout=0.3
)
register_size("transformer_wmt_en_de", 6, 512, 8, 2048)  # the base of Vaswani et al.
register_size("transformer_wmt_en_de_big", 6, 1024, 16, 4096, attention_dropout=0.1, dropout=0.3, embedding_dropout=0.3)
