"""CPM-Ant (Zeng et al. 2022, https://live.openbmb.org) and its size, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ftk.config.options import option
from ftk.models.config import register_family
from ftk.models.cpm import CPMConfig


@dataclass(kw_only=True)
class CPMAntConfig(CPMConfig):
    """The shape of a CPM-Ant."""

    tie_embeddings: ClassVar[bool] = False

    max_positions: int = option(2048, "longest sequence that the model reads", min=1, max=10**8, unit="tokens")
    prompt_length: int = option(
        32, "learned rows in front of each text, which all tokens see", max=10**6, unit="tokens"
    )
    prompt_types: int = option(32, "prompts of the token embedding; the third is used", min=3, max=10**6)
    segment_types: int = option(32, "kinds of text: the prompt is 0, all else is 2", min=3, max=10**4)

    @property
    def embedding_rows(self) -> int:
        """The vocabulary, then the rows of the prompts."""
        return self.vocab_size + self.prompt_types * self.prompt_length

    @property
    def prompt_ids(self) -> range:
        """Ids of the rows in front of each text."""
        return range(self.vocab_size + 2 * self.prompt_length, self.vocab_size + 3 * self.prompt_length)


_TINY: dict[str, Any] = {"head_dim": 16, "prompt_length": 4, "prompt_types": 3, "max_positions": 512}

register_size = register_family("cpmant", CPMAntConfig, "ftk.models.cpmant.model:CPMAnt", vocab_size=30720)
register_size("cpmant_tiny", 4, 64, 4, 172, **_TINY)  # not published: for tests and first tries
register_size("cpmant_10b", 48, 4096, 32, 10240)  # 9.5B parameters
