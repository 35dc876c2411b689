"""GLM-130B (Zeng et al. 2023), ChatGLM-6B and their sizes, registered here without importing torch.

They fill blanks as the original GLM does, with rotary positions and DeepNorm's residual path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ftk.config.options import option
from ftk.models.config import TransformerConfig, register_family, tie_option
from ftk.registry import Recipe


@dataclass(kw_only=True)
class RotaryGLMConfig(TransformerConfig):
    """What the two families share.

    Attributes:
        residual_layers: L of the factor sqrt(2 L) on the residual path.
    """

    block_positions: bool = option(
        True,
        "2-D rotary positions: the second half of each head is rotated by the place within a blank; the "
        "task's in training",
        derived=True,
    )

    gmask_runs_on: bool = option(
        False,
        "places in the text count on in the answer to a [gMASK]; else they stay at the blank's; the task's in training",
        derived=True,
    )

    @property
    def residual_layers(self) -> int:
        return self.num_layers

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        parts = 4 if self.block_positions else 2
        if self.head_size % parts:
            yield f"the size of a head is {self.head_size}; these rotary positions need a multiple of {parts}"


@dataclass(kw_only=True)
class GLM130BConfig(RotaryGLMConfig):
    """The shape of a GLM-130B, which has gated feed-forward networks."""

    activation: ClassVar[str] = "gelu"
    gated: ClassVar[bool] = True  # type: ignore[misc]


@dataclass(kw_only=True)
class ChatGLMConfig(RotaryGLMConfig):
    """The shape of a ChatGLM-6B."""

    residual_layers: ClassVar[int] = 28  # type: ignore[misc]  # in its code, whatever the number of layers

    tie_embeddings: bool = tie_option(True)  # type: ignore[misc]
    embedding_dropout: float = option(0.0, "dropout of the token embeddings", "[0, 1)")
    attention_dropout: float = option(0.0, "dropout of attention weights", "[0, 1)")
    dropout: float = option(0.0, "dropout of each attention and feed-forward output", "[0, 1)")


GLM130B_POSITIONS: dict[str, Any] = {"block_positions": False, "gmask_runs_on": True}


def _recipe(task: dict[str, Any]) -> Callable[[int], Recipe]:
    """Zeng et al. 2023, appendix B, with a rate for first tries at width 64."""
    return lambda hidden_size: {
        "optimizer": {
            "_name": "adamw",
            "lr": 3e-3 if hidden_size <= 64 else 8e-5,
            "betas": [0.9, 0.95],
            "weight_decay": 0.1,
        },
        "lr_scheduler": {"_name": "cosine", "warmup_ratio": 0.005, "min_lr_ratio": 0.1},
        "task": {"_name": "glm_blank", **task},
    }


register_size = register_family(
    "glm130b",
    GLM130BConfig,
    "ftk.models.glm130b.model:GLM130B",
    task="glm_blank",
    recipe=_recipe(GLM130B_POSITIONS),
    vocab_size=150528,
    max_positions=2048,
    **GLM130B_POSITIONS,
)
register_size("glm130b_tiny", 4, 64, 4, 172, max_positions=512)  # not published: for tests and first tries
register_size("glm_130b", 70, 12288, 96, 32768, init_std=0.0052)  # 128.7B parameters

register_size_chat = register_family(
    "chatglm",
    ChatGLMConfig,
    "ftk.models.glm130b.model:ChatGLM",
    task="glm_blank",
    recipe=_recipe({}),
    vocab_size=130528,
    max_positions=2048,
)
register_size_chat("chatglm_tiny", 4, 64, 4, max_positions=512)  # not published: for tests and first tries
register_size_chat("chatglm_6b", 28, 4096, 32, 16384)  # 6.17B parameters, 6.71B with an output layer of its own
