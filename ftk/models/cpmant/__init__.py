"""CPM-Ant (Zeng et al. 2022, https://live.openbmb.org) and its size, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ftk.models.config import TransformerConfig, register_family


@dataclass(kw_only=True)
class CPMAntConfig(TransformerConfig):
    """The shape of a CPM-Ant."""

    tie_embeddings: ClassVar[bool] = False
    activation: ClassVar[str] = "gelu"

    head_dim: int = field(default=128, metadata={"min": 1, "max": 10**5, "help": "size of a head"})
    prompt_length: int = field(
        default=32,
        metadata={"max": 10**6, "help": "learned rows in front of each text, which all tokens see", "unit": "tokens"},
    )
    prompt_types: int = field(
        default=32,
        metadata={"min": 3, "max": 10**6, "help": "prompts of the token embedding; the third is used"},
    )
    segment_types: int = field(
        default=32, metadata={"min": 3, "max": 10**4, "help": "kinds of text: the prompt is 0, all else is 2"}
    )
    num_position_buckets: int = field(
        default=512,
        metadata={"min": 4, "max": 10**6, "help": "position biases within a segment, one a range"},
    )
    max_position_distance: int = field(
        default=2048,
        metadata={
            "min": 2,
            "max": 10**8,
            "help": "distance from which on position biases are the same",
            "unit": "tokens",
        },
    )
    layer_norm_eps: float = field(default=1e-6, metadata={"help": "added to the mean square in norms"})
    embedding_dropout: float = field(default=0.0, metadata={"help": "dropout of the token embeddings, in [0, 1)"})
    attention_dropout: float = field(default=0.0, metadata={"help": "dropout of attention weights, in [0, 1)"})
    dropout: float = field(
        default=0.0, metadata={"help": "dropout of each attention and feed-forward output, in [0, 1)"}
    )

    @property
    def embedding_rows(self) -> int:
        """The vocabulary, then the rows of the prompts."""
        return self.vocab_size + self.prompt_types * self.prompt_length

    @property
    def prompt_ids(self) -> range:
        """Ids of the rows in front of each text."""
        return range(self.vocab_size + 2 * self.prompt_length, self.vocab_size + 3 * self.prompt_length)

    @property
    def heads_share_width(self) -> bool:
        """Whether the heads together are as wide as the residual path."""
        return False

    @property
    def head_size(self) -> int:
        """D: size of a head."""
        return self.head_dim

    @property
    def layer_multiplications(self) -> int:
        """Of one token in one layer."""
        attention = 4 * self.hidden_size * self.num_attention_heads * self.head_dim
        return attention + 3 * self.hidden_size * self.inner_size


_TINY: dict[str, Any] = {"head_dim": 16, "prompt_length": 4, "prompt_types": 3, "max_positions": 512}

register_size = register_family(
    "cpmant", CPMAntConfig, "ftk.models.cpmant.model:CPMAnt", vocab_size=30720, max_positions=2048
)
register_size("cpmant_tiny", 4, 64, 4, 172, **_TINY)  # not published: for tests and first tries
register_size("cpmant_10b", 48, 4096, 32, 10240)  # 9.5B parameters
