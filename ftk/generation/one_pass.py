"""Options of models that answer in one forward pass, without a search; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ftk.config.options import option
from ftk.generation.config_groups import MOST_ANSWERS, BatchConfig


@dataclass(kw_only=True)
class OnePassConfig(BatchConfig):
    """Options of all of them.

    Attributes:
        does: what such a model does, for messages.
    """

    does: ClassVar[str]

    # What is asked of every task's options, and is no option here.
    of_scores: ClassVar[tuple[str, ...]] = ()
    of_prompts: ClassVar[tuple[str, ...]] = ()
    search: ClassVar[str] = "one forward pass"
    max_len: ClassVar[None] = None
    length_penalty: ClassVar[float] = 1.0
    seed: ClassVar[int] = 1
    lm_path: ClassVar[None] = None


@dataclass(kw_only=True)
class ClassifyConfig(OnePassConfig):
    """How texts are classified."""

    does: ClassVar[str] = "gives texts labels, and writes none"

    nbest: int = option(
        1,
        "give this many likeliest labels, with their probabilities",
        daily=True,
        min=1,
        max=MOST_ANSWERS,
        unit="labels",
    )


@dataclass(kw_only=True)
class NoProcessors:
    """No options: nothing steers what is found in one pass."""
