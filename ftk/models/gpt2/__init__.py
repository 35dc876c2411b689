"""GPT-2 (Radford et al. 2019), CPM-1 (Zhang et al. 2020) and their sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from ftk.config.options import option
from ftk.models.config import TransformerConfig, activation_option, register_family, tie_option


@dataclass(kw_only=True)
class GPT2Config(TransformerConfig):
    """The shape of a GPT-2 and its dropout."""

    activation: str = activation_option("gelu_tanh")  # type: ignore[misc]
    scale_scores: bool = option(True, "divide attention scores by the root of the size of a head")
    scale_by_layer: bool = option(False, "divide attention scores of each layer by its number, from 1 on")
    tie_embeddings: bool = tie_option(True)  # type: ignore[misc]


register_size = register_family("gpt2", GPT2Config, "ftk.models.gpt2.model:GPT2", vocab_size=50257, max_positions=1024)

register_size("gpt2_tiny", 4, 64, 4, max_positions=512)  # not published: for tests and first tries
register_size("gpt2", 12, 768, 12)  # 124M parameters
register_size("gpt2_medium", 24, 1024, 16)  # 355M
register_size("gpt2_large", 36, 1280, 20)  # 774M
register_size("gpt2_xl", 48, 1600, 25)  # 1.56B

# CPM-1, as published; the network of the same name in ModelCenter is another one (`ftk.models.cpm`).
register_size("cpm_small", 12, 768, 12, vocab_size=30000)  # 109M
register_size("cpm_medium", 24, 1024, 16, vocab_size=30000)  # 334M
register_size("cpm_large", 32, 2560, 32, vocab_size=30000)  # 2.6B
