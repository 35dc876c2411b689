"""OPT (Zhang et al. 2022) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from ftk.config.options import option
from ftk.models.config import TransformerConfig, activation_option, register_family, tie_option


@dataclass(kw_only=True)
class OPTConfig(TransformerConfig):
    """The shape of an OPT and its dropout."""

    activation: str = activation_option("relu")  # type: ignore[misc]
    tie_embeddings: bool = tie_option(True)  # type: ignore[misc]
    bias: bool = option(True, "biases of attention and of the feed-forward network; Galactica has none")
    norm_weights: bool = option(True, "weights and biases in norms; Galactica has none")
    word_embedding_size: int | None = option(
        None,
        "width of the token embedding, projected to hidden_size and back; hidden_size if not given",
        min=1,
        max=10**6,
    )
    norm_first: bool = option(True, "norms before attention and feed-forward network; else post-norm (350M)")
    scale_embeddings: bool = option(False, "multiply token embeddings by the root of hidden_size")
    learned_positions: bool = option(True, "a table of positions; else waves, as in fairseq's language models")
    embedding_dropout: float = option(0.0, "dropout of the summed embeddings", "[0, 1)")
    attention_dropout: float = option(0.0, "dropout of attention weights", "[0, 1)")

    @property
    def first_position_row(self) -> int:
        """Row of position 0 in the table of positions; published files have those before it, once for padding."""
        return 2

    @property
    def embedding_size(self) -> int:
        """Width of the token embedding and of what the output layer reads."""
        return self.hidden_size if self.word_embedding_size is None else self.word_embedding_size


register_size = register_family("opt", OPTConfig, "ftk.models.opt.model:OPT", vocab_size=50272, max_positions=2048)

register_size("opt_tiny", 4, 64, 4, max_positions=512)  # not published: for tests and first tries
register_size("opt_125m", 12, 768, 12)  # 125.2M parameters
register_size("opt_350m", 24, 1024, 16, word_embedding_size=512, norm_first=False)  # 331.2M
register_size("opt_1_3b", 24, 2048, 32)  # 1.32B
register_size("opt_2_7b", 32, 2560, 32)  # 2.65B
register_size("opt_6_7b", 32, 4096, 32)  # 6.66B
register_size("opt_13b", 40, 5120, 40)  # 12.9B
register_size("opt_30b", 48, 7168, 56)  # 30.0B
register_size("opt_66b", 64, 9216, 72)  # 65.7B
register_size("opt_175b", 96, 12288, 96)  # 175B
