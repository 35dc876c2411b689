"""T5 (Raffel et al. 2020), its version 1.1, mT5 (Xue et al. 2021) and their published sizes, registered here without
importing torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option
from ftk.models.config import ACTIVATION_NAMES, position_bucket_errors, register_family, tie_option
from ftk.models.encoder_decoder.config import EncoderDecoderConfig
from ftk.registry import Recipe


@dataclass(kw_only=True)
class T5Config(EncoderDecoderConfig):
    """The shape of a T5 and its dropout."""

    head_dim: int = option(64, "size of a head", min=1, max=10**5)
    gated: bool = option(False, "gated feed-forward networks with GELU, as of version 1.1; else plain ones, ReLU")
    gate_activation: str = option(
        "gelu_tanh",
        "activation of gated feed-forward networks; UL2 has silu",
        needs={"gated": True},
        choices=ACTIVATION_NAMES,
    )
    plain_activation: str = option(
        "relu", "activation of feed-forward networks without gates", choices=ACTIVATION_NAMES
    )
    tie_embeddings: bool = tie_option(True)  # type: ignore[misc]
    scale_outputs: bool = option(True, "divide what the output layer reads by the root of hidden_size")
    num_position_buckets: int = option(
        32, "rows of each stack's table of position biases, one for a range of distances", min=4, max=10**6
    )
    max_position_distance: int = option(
        128, "distance from which on position biases are the same", min=2, max=10**8, unit="tokens"
    )
    activation_dropout: float = option(0.1, "dropout after the activation of the feed-forward network", "[0, 1)")
    layer_norm_eps: float = option(1e-6, "added to the mean square in norms", "(0, inf)")
    init_std: float = option(
        1.0,
        "standard deviation of the initial token embedding; other matrices divide it by the root of the "
        "number of their inputs",
        "(0, inf)",
    )

    @property
    def activation(self) -> str:  # type: ignore[override]
        """Of the feed-forward network."""
        return self.gate_activation if self.gated else self.plain_activation

    @property
    def position_limit(self) -> None:
        """Distances have no greatest one."""

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.gated and self.plain_activation != "relu":
            yield f"plain_activation is {self.plain_activation}, but with gates it is gate_activation that counts"
        yield from position_bucket_errors(self.num_position_buckets, self.max_position_distance)


@dataclass(kw_only=True)
class MT5Config(T5Config):
    """The shape of an mT5 and its dropout."""

    gated: bool = option(True, "gated feed-forward networks with GELU; else plain ones, ReLU")
    tie_embeddings: bool = tie_option(False)  # type: ignore[misc]
    scale_outputs: bool = option(False, "divide what the output layer reads by the root of hidden_size")


def t5_recipe(hidden_size: int) -> Recipe:
    """Raffel et al. 2020, 3.1.2: Adafactor at a rate of 0.01, from update 10^4 on at the inverse root of their number.

    For width 64, of first tries, a usual rate of AdamW and short samples.
    """
    if hidden_size > 64:
        return {"optimizer": {"_name": "adafactor", "lr": 1e-2}, "lr_scheduler": {"_name": "constant"}}
    return {
        "optimizer": {"_name": "adamw", "lr": 3e-3, "betas": [0.9, 0.98], "weight_decay": 0.01},
        "lr_scheduler": {"_name": "linear", "warmup_ratio": 0.05},
        "task": {"_name": "span_corruption", "seq_length": 128},
    }


_MODEL = "ftk.models.t5.model:T5"
_V1_1 = {"gated": True, "tie_embeddings": False, "scale_outputs": False}

register_size = register_family(
    "t5", T5Config, _MODEL, task="span_corruption", recipe=t5_recipe, vocab_size=32128, max_positions=512
)
register_size("t5_tiny", 2, 64, 4, 128, head_dim=16)  # not published: for tests and first tries
register_size("t5_small", 6, 512, 8, 2048)  # 60.5M parameters
register_size("t5_base", 12, 768, 12, 3072)  # 222.9M
register_size("t5_large", 24, 1024, 16, 4096)  # 737.7M
register_size("t5_3b", 24, 1024, 32, 16384, head_dim=128)  # 2.85B
register_size("t5_11b", 24, 1024, 128, 65536, head_dim=128)  # 11.3B
register_size("t5_1_1_small", 8, 512, 6, 1024, **_V1_1)  # 77.0M
register_size("t5_1_1_base", 12, 768, 12, 2048, **_V1_1)  # 247.6M
register_size("t5_1_1_large", 24, 1024, 16, 2816, **_V1_1)  # 783.2M
register_size("t5_1_1_xl", 24, 2048, 32, 5120, **_V1_1)  # 2.85B
register_size("t5_1_1_xxl", 24, 4096, 64, 10240, **_V1_1)  # 11.1B

register_mt5_size = register_family(
    "mt5", MT5Config, _MODEL, task="span_corruption", recipe=t5_recipe, vocab_size=250112, max_positions=1024
)
register_mt5_size("mt5_small", 8, 512, 6, 1024)  # 300.2M
register_mt5_size("mt5_base", 12, 768, 12, 2048)  # 582.4M
register_mt5_size("mt5_large", 24, 1024, 16, 2816)  # 1.23B
register_mt5_size("mt5_xl", 24, 2048, 32, 5120)  # 3.74B
register_mt5_size("mt5_xxl", 24, 4096, 64, 10240)  # 12.9B
