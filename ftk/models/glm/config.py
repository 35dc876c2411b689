"""The options of GLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftk.models.config import TransformerConfig


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
