"""Longformer (Beltagy et al. 2020) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ftk.config.options import option
from ftk.models.encoder.config import PaddedEncoderConfig, register_encoder


@dataclass(kw_only=True)
class LongformerConfig(PaddedEncoderConfig):
    """The shape of a Longformer."""

    has_global_tokens: ClassVar[bool] = True

    attention_window: list[int] = option(
        [512],
        "tokens that a token sees besides itself and the global ones, half of them on either side; one "
        "number, or one for each layer",
        min=2,
        max=10**8,
        unit="tokens",
    )

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """See `TransformerConfig`."""
        windows = self.attention_window * (self.num_layers if len(self.attention_window) == 1 else 1)
        return tuple(window // 2 + 1 for window in windows)

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if len(self.attention_window) not in (1, self.num_layers):
            yield (
                f"attention_window has {len(self.attention_window)} numbers; it must have one, or one for each of the "
                f"{self.num_layers} layers"
            )
        for window in self.attention_window:
            if window % 2:
                yield f"attention_window has {window}; a window must be even"


register_size = register_encoder(
    "longformer", LongformerConfig, "ftk.models.longformer.model:Longformer", vocab_size=50265, layer_norm_eps=1e-5
)

# not published: for tests and first tries
register_size("longformer_tiny", 4, 64, 4, max_positions=512, attention_window=[32])
register_size("longformer_base_4096", 12, 768, 12, max_positions=4096)  # 148.7M parameters
register_size("longformer_large_4096", 24, 1024, 16, max_positions=4096)  # 434.7M
