"""CPM-1 and CPM-2 of ModelCenter (https://github.com/OpenBMB/ModelCenter), registered here without importing torch.

CPM-1 as its authors published it is another network, a GPT-2 (`ftk.models.gpt2`). What CPM-1 and CPM-Ant share is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ftk.config.options import option
from ftk.models.config import TransformerConfig, position_bucket_errors, register_family, tie_option
from ftk.models.t5 import T5Config, t5_recipe


@dataclass(kw_only=True)
class CPMConfig(TransformerConfig):
    """The shape of a decoder whose positions are biases of attention scores.

    Attributes:
        sees_prompt: whether the tokens of a prompt all see each other in generation; a family may make an option of it.
    """

    activation: ClassVar[str] = "gelu"
    gated: ClassVar[bool] = True  # type: ignore[misc]
    sees_prompt: ClassVar[bool] = True

    head_dim: int = option(128, "size of a head", min=1, max=10**5)
    num_position_buckets: int = option(512, "position biases of a head, one for a range of distances", min=4, max=10**6)
    max_position_distance: int = option(
        2048, "distance from which on position biases are the same", min=2, max=10**8, unit="tokens"
    )
    layer_norm_eps: float = option(1e-6, "added to the mean square in norms", "(0, inf)")
    embedding_dropout: float = option(0.0, "dropout of the token embeddings", "[0, 1)")
    attention_dropout: float = option(0.0, "dropout of attention weights", "[0, 1)")
    dropout: float = option(0.0, "dropout of each attention and feed-forward output", "[0, 1)")

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        yield from position_bucket_errors(self.num_position_buckets, self.max_position_distance)


@dataclass(kw_only=True)
class CPM1Config(CPMConfig):
    """The shape of a CPM-1 of ModelCenter."""

    tie_embeddings: bool = tie_option(True)  # type: ignore[misc]
    sees_prompt: bool = option(  # type: ignore[misc]
        False,
        "the tokens of a prompt all see each other in generation, as in the training of the published "
        "weights; else they are read from left to right, as causal_lm trains",
    )


@dataclass(kw_only=True)
class CPM2Config(T5Config):
    """The shape of a CPM-2: T5 1.1 with the exact GELU."""

    gated: ClassVar[bool] = True  # type: ignore[misc]
    tie_embeddings: ClassVar[bool] = False  # type: ignore[misc]
    scale_outputs: ClassVar[bool] = False  # type: ignore[misc]
    gate_activation: ClassVar[str] = "gelu"  # type: ignore[misc]


_NO_DROPOUT = dict.fromkeys(("dropout", "embedding_dropout", "attention_dropout", "activation_dropout"), 0.0)

register_cpm1_size = register_family(
    "cpm1",
    CPM1Config,
    "ftk.models.cpm.model:CPM1",
    vocab_size=30968,
    max_positions=512,
    num_position_buckets=64,
    max_position_distance=256,
)
register_cpm1_size("cpm1_tiny", 4, 64, 4, 172, head_dim=16)  # not published: for tests and first tries
register_cpm1_size("cpm1_large", 32, 2560, 32, 6400, head_dim=80)  # 2.49B parameters

register_cpm2_size = register_family(
    "cpm2",
    CPM2Config,
    "ftk.models.t5.model:T5",
    task="span_corruption",
    recipe=t5_recipe,
    vocab_size=26240,
    max_positions=512,
    **_NO_DROPOUT,
)
register_cpm2_size("cpm2_tiny", 2, 64, 4, 172, head_dim=16)  # not published: for tests and first tries
register_cpm2_size("cpm2_large", 24, 4096, 64, 10240, head_dim=64)  # 11.1B parameters
