"""GLM (Du et al. 2022) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ftk.config.options import option
from ftk.models.config import TransformerConfig, register_family
from ftk.registry import Recipe, Registry

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
    INNER_POSITION_TABLES: ClassVar[tuple[str, ...]] = ("position_embedding.block.weight",)  # row 0: in no blank


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

register_size = register_family(
    "glm", GLMConfig, "ftk.models.glm.model:GLM", task="glm_blank", max_positions=512, vocab_size=30592
)

# Du et al. 2022, table 10, and config/ds_*.sh of its public code. Vocabularies, padded: 30592 English word pieces
# of BERT, 50304 byte pairs of GPT-2 (of RoBERTa for glm_roberta_large), 50048 Chinese SentencePiece; where there is a
# tokenizer, `vocab_size` is its own. The three of 24 layers are 335M in name.
register_size("glm_tiny", 4, 64, 4, own_recipe=_TINY)  # not published: for tests and first tries
register_size("glm_base", 12, 768, 12, own_recipe=_BASE)  # 110M parameters
register_size("glm_large", 24, 1024, 16, own_recipe=_LARGE)  # 335M
register_size("glm_large_chinese", 24, 1024, 16, max_positions=1024, vocab_size=50048, own_recipe=_CHINESE)  # 356M
register_size("glm_roberta_large", 24, 1024, 16, vocab_size=50304, own_recipe=_ROBERTA)  # 355M, RoBERTa's
register_size("glm_410m", 30, 1024, 16, own_recipe=_LARGE)  # token and document objectives, as 515M; larger: all
register_size("glm_515m", 30, 1152, 18, own_recipe=_LARGE)
register_size("glm_2b", 36, 2048, 32, max_positions=1024, vocab_size=50304, own_recipe=_BILLIONS)
register_size("glm_10b", 48, 4096, 64, max_positions=1024, vocab_size=50304, own_recipe=_BILLIONS)
register_size("glm_10b_chinese", 48, 4096, 64, max_positions=1024, vocab_size=50048, own_recipe=_BILLIONS)
