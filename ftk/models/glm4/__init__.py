"""ChatGLM2 and 3, GLM-4 and GLM-4-0414 (GLM team 2024) and their sizes, registered here without importing torch.

They are causal language models of LLaMA's form, and share no code with the original GLM, which fills blanks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ftk.config.options import option
from ftk.models.config import register_family
from ftk.models.rotary.config import RotaryConfig, register_rotary


@dataclass(kw_only=True)
class GLM4Config(RotaryConfig):
    """The shape of a GLM-4."""

    interleaved: ClassVar[bool] = True

    attention_bias: bool = option(True, "biases of queries, keys and values")
    rotary_share: float = option(0.5, "leading share of each head that is rotated", min=0, max=1)

    @property
    def qkv_bias(self) -> bool:  # type: ignore[override]
        """Of the joint projection."""
        return self.attention_bias

    @property
    def rotary_size(self) -> int:
        """R: leading dimensions of a head that are rotated."""
        return int(self.head_size * self.rotary_share)

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.rotary_size % 2 or self.rotary_size < 2:
            size = f"{self.rotary_size} of the {self.head_size} dimensions of a head"
            yield f"rotary_share is {self.rotary_share}, {size}; the rotated size must be even and at least 2"


@dataclass(kw_only=True)
class ChatGLM2Config(GLM4Config):
    """The shape of a ChatGLM2 or 3: the same network, with other names in published files."""


@dataclass(kw_only=True)
class GLM4x0414Config(GLM4Config):
    """The shape of a GLM-4-0414."""


_COMMON: dict[str, Any] = {"vocab_size": 151552, "head_dim": 128, "num_kv_heads": 2}
_TINY: dict[str, Any] = {"head_dim": 16, "max_positions": 512}

register_size = register_rotary("glm4", GLM4Config, max_positions=8192, layer_norm_eps=1.5625e-7, **_COMMON)
register_size("glm4_tiny", 4, 64, 4, 172, **_TINY)  # not published: for tests and first tries
register_size("glm4_9b", 40, 4096, 32, 13696)  # 9.40B parameters

register_size_chat = register_rotary(
    "chatglm2", ChatGLM2Config, max_positions=32768, layer_norm_eps=1e-5, **{**_COMMON, "vocab_size": 65024}
)
register_size_chat("chatglm2_tiny", 4, 64, 4, 172, **_TINY)  # not published: for tests and first tries
register_size_chat("chatglm2_6b", 28, 4096, 32, 13696)  # 6.24B; of ChatGLM3, too

register_size_0414 = register_family(
    "glm4_0414",
    GLM4x0414Config,
    "ftk.models.glm4.model:GLM4x0414",
    max_positions=32768,
    layer_norm_eps=1e-5,
    **_COMMON,
)
register_size_0414("glm4_0414_tiny", 4, 64, 4, 172, **_TINY)  # not published: for tests and first tries
register_size_0414("glm4_0414_9b", 40, 4096, 32, 13696)  # 9.40B
register_size_0414("glm4_0414_32b", 61, 6144, 48, 23040, attention_bias=False)  # 32.6B
