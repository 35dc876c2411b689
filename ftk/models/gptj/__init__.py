"""GPT-J (Wang and Komatsuzaki 2021) and its published size, registered here without importing torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option
from ftk.models.config import TransformerConfig, activation_option, register_family, tie_option


@dataclass(kw_only=True)
class GPTJConfig(TransformerConfig):
    """The shape of a GPT-J and its dropout."""

    activation: str = activation_option("gelu_tanh")  # type: ignore[misc]
    tie_embeddings: bool = tie_option(False)  # type: ignore[misc]
    rotary_dim: int = option(64, "leading dimensions of a head that are rotated; the others are not", max=10**5)
    embedding_dropout: float = option(0.0, "dropout of the token embeddings", "[0, 1)")
    attention_dropout: float = option(0.0, "dropout of attention weights", "[0, 1)")
    dropout: float = option(0.0, "dropout of each attention and feed-forward output", "[0, 1)")

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_size:
            yield f"rotary_dim is {self.rotary_dim}; it must be even and from 2 to the size of a head, {self.head_size}"


register_size = register_family("gptj", GPTJConfig, "ftk.models.gptj.model:GPTJ", vocab_size=50400, max_positions=2048)

register_size("gptj_tiny", 4, 64, 4, rotary_dim=8, max_positions=512)  # not published: for tests and first tries
register_size("gptj_6b", 28, 4096, 16)  # 6.05B parameters
