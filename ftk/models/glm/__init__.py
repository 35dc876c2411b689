"""GLM (Du et al. 2022) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftk.models.config import TransformerConfig
from ftk.registry import register_architecture, register_model

if TYPE_CHECKING:
    from ftk.models.glm.model import GLM


@dataclass(kw_only=True)
class GLMConfig(TransformerConfig):
    """The shape of a GLM and its dropout. `vocab_size` counts the padded vocabulary."""

    block_positions: bool = field(
        default=True,
        metadata={
            "help": "second position: the place within a blank (2-D positions); the task's in training",
            "derived": True,
        },
    )


@register_model("glm", config=GLMConfig, task="glm_blank")
def build_glm(config: GLMConfig, seed: int | None = None) -> GLM:
    """`GLM(config, seed)`: see there."""
    from ftk.models.glm.model import GLM

    return GLM(config, seed)


def _register(
    name: str, num_layers: int, hidden_size: int, num_heads: int, max_positions: int, vocab_size: int
) -> None:
    @register_architecture(name, model="glm")
    def preset() -> GLMConfig:
        return GLMConfig(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_attention_heads=num_heads,
            max_positions=max_positions,
            vocab_size=vocab_size,
        )


# Du et al. 2022, table 10, and the configurations of its public code. Vocabularies, padded: 30592 English word pieces
# of BERT, 50304 byte pairs of GPT-2 (of RoBERTa for glm_roberta_large), 50048 Chinese SentencePiece; where there is a
# tokenizer, `vocab_size` is its own.
_register("glm_tiny", 4, 64, 4, 512, 30592)  # not published: for tests and first tries
_register("glm_base", 12, 768, 12, 512, 30592)  # 110M parameters
_register("glm_large", 24, 1024, 16, 512, 30592)  # 335M
_register("glm_large_chinese", 24, 1024, 16, 1024, 50048)  # 356M (335M in name)
_register("glm_roberta_large", 24, 1024, 16, 512, 50304)  # 355M (335M in name), RoBERTa's data
_register("glm_410m", 30, 1024, 16, 512, 30592)  # token and document objectives, as is the next
_register("glm_515m", 30, 1152, 18, 512, 30592)
_register("glm_2b", 36, 2048, 32, 1024, 50304)  # all three objectives, as are those of 10B
_register("glm_10b", 48, 4096, 64, 1024, 50304)
_register("glm_10b_chinese", 48, 4096, 64, 1024, 50048)
