"""The options of generation, with their meaning, units and limits; imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ftk.errors import UserError


@dataclass(kw_only=True)
class GenerationConfig:
    """How answers are searched for. Greedy unless `beam` is above 1 or `sampling` is on."""

    beam: int = field(default=1, metadata={"help": "hypotheses kept per prompt; 1 is greedy decoding"})
    max_len: int = field(default=24, metadata={"help": "longest answer of a blank", "unit": "tokens"})
    min_len: int = field(default=0, metadata={"help": "shortest answer of a blank; no end before", "unit": "tokens"})
    length_penalty: float = field(
        default=1.0,
        metadata={"help": "score = sum of log-probabilities / length ** this; above 1 favours long answers"},
    )
    sampling: bool = field(default=False, metadata={"help": "draw tokens at random instead of searching"})
    temperature: float = field(default=1.0, metadata={"help": "sampling: divides the logits; above 0"})
    top_k: int = field(
        default=0,
        metadata={"help": "sampling: draw among so many likeliest tokens; 0: all", "unit": "tokens"},
    )
    top_p: float = field(
        default=1.0,
        metadata={"help": "sampling: draw among the fewest tokens that hold this share, in (0, 1]"},
    )
    seed: int = field(default=1, metadata={"help": "sampling: prompt and seed alone decide the answer"})
    batch_size: int = field(default=16, metadata={"help": "so many are answered at once", "unit": "prompts"})

    def validate(self) -> Iterator[str]:
        """One message for each value, or pair of values, that is not allowed."""
        for name in ("beam", "max_len", "batch_size"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"
        if not 0 <= self.min_len <= self.max_len:
            yield f"min_len is {self.min_len}; it must be from 0 to max_len {self.max_len}"
        if not self.temperature > 0.0:
            yield f"temperature is {self.temperature}; it must be above 0"
        if self.top_k < 0:
            yield f"top_k is {self.top_k}; it must be 0 (all tokens) or more"
        if not 0.0 < self.top_p <= 1.0:
            yield f"top_p is {self.top_p}; it must be above 0 and at most 1"
        if self.sampling and self.beam > 1:
            yield f"beam is {self.beam} and sampling is on; choose one of them"
        if not self.sampling:
            for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
                if getattr(self, name) != neutral:
                    yield f"{name} is {getattr(self, name)} but sampling is off; turn it on"


def generation_config(config: GenerationConfig | None = None, **options: Any) -> GenerationConfig:
    """`config` (or the defaults) with the options given by keyword, checked.

    Raises:
        UserError: an unknown option or values that are not allowed, all of them named.
    """
    known = [one.name for one in dataclasses.fields(GenerationConfig)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"unknown generation option {name!r}; {hint}there are: {', '.join(known)}")
    result = dataclasses.replace(config or GenerationConfig(), **options)
    errors = list(result.validate())
    if errors:
        raise UserError("; ".join(errors))
    return result
