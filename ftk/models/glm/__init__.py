"""GLM (Du et al. 2022) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftk.config.options import option
from ftk.models.config import TransformerConfig
from ftk.registry import Recipe, Registry, register_architecture, register_model

if TYPE_CHECKING:
    from ftk.models.glm.model import GLM

ORIGINAL_FAMILIES = Registry("original_family")  # by model: `ftk.models.glm.convert.OriginalFamily`
register_original_family = ORIGINAL_FAMILIES.register


@dataclass(kw_only=True)
class GLMConfig(TransformerConfig):
    """The shape of a GLM and its dropout. `vocab_size` counts the padded vocabulary."""

    activation: str = option(  # type: ignore[misc]
        "gelu_tanh",
        "GELU of the feed-forward network: gelu_tanh (the original's) or gelu (exact; models from Hugging Face)",
        choices=("gelu_tanh", "gelu"),
    )
    block_positions: bool = option(
        True, "second position: the place within a blank (2-D positions); the task's in training", derived=True
    )


@register_model("glm", config=GLMConfig, task="glm_blank")
def build_glm(config: GLMConfig, seed: int | None = None) -> GLM:
    """`GLM(config, seed)`: see there."""
    from ftk.models.glm.model import GLM

    return GLM(config, seed)


def _recipe(
    lr: float, weight_decay: float, warmup_ratio: float, min_lr_ratio: float, batch_size: int = 16,
    betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-6, lr_scheduler: str = "cosine",
) -> Recipe:  # fmt: skip
    """Published values; the warm-up, in updates there, as a share of the run, and the decay takes the rest of it."""
    return {
        "optimizer": {"_name": "adamw", "lr": lr, "betas": list(betas), "eps": eps, "weight_decay": weight_decay},
        "lr_scheduler": {"_name": lr_scheduler, "warmup_ratio": warmup_ratio, "min_lr_ratio": min_lr_ratio},
        "dataloader": {"batch_size": batch_size},  # per process; published are 1,024 samples an update
    }


_TINY = _recipe(3e-3, 0.01, 0.05, 0.1, batch_size=8)
_BASE = _recipe(4e-4, 0.1, 0.04, 0.05)
_CHINESE = _recipe(4e-4, 0.01, 0.032, 0.1, batch_size=32)
_ROBERTA = _recipe(4e-4, 0.01, 0.06, 0.025, lr_scheduler="linear")
_LARGE = _recipe(2e-4, 0.1, 0.04, 0.05)
_BILLIONS = _recipe(1e-4, 0.1, 0.03, 0.1, batch_size=21, betas=(0.9, 0.95), eps=1e-8)


def _register(
    name: str, num_layers: int, hidden_size: int, num_heads: int, max_positions: int, vocab_size: int, recipe: Recipe
) -> None:
    @register_architecture(name, model="glm", recipe=recipe)
    def preset() -> GLMConfig:
        return GLMConfig(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_attention_heads=num_heads,
            max_positions=max_positions,
            vocab_size=vocab_size,
        )


# Du et al. 2022, table 10, and config/ds_*.sh of its public code. Vocabularies, padded: 30592 English word pieces
# of BERT, 50304 byte pairs of GPT-2 (of RoBERTa for glm_roberta_large), 50048 Chinese SentencePiece; where there is a
# tokenizer, `vocab_size` is its own.
_register("glm_tiny", 4, 64, 4, 512, 30592, _TINY)  # not published: for tests and first tries
_register("glm_base", 12, 768, 12, 512, 30592, _BASE)  # 110M parameters
_register("glm_large", 24, 1024, 16, 512, 30592, _LARGE)  # 335M
_register("glm_large_chinese", 24, 1024, 16, 1024, 50048, _CHINESE)  # 356M (335M in name)
_register("glm_roberta_large", 24, 1024, 16, 512, 50304, _ROBERTA)  # 355M (335M in name), RoBERTa's data
_register("glm_410m", 30, 1024, 16, 512, 30592, _LARGE)  # token and document objectives, as is the next
_register("glm_515m", 30, 1152, 18, 512, 30592, _LARGE)
_register("glm_2b", 36, 2048, 32, 1024, 50304, _BILLIONS)  # all three objectives, as are those of 10B
_register("glm_10b", 48, 4096, 64, 1024, 50304, _BILLIONS)
_register("glm_10b_chinese", 48, 4096, 64, 1024, 50048, _BILLIONS)
