"""Options that concern single parameters: which are trained, which are decayed, and how fast each learns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

_PATTERN = "shell pattern of a parameter's or a module's name"


@dataclass(kw_only=True)
class ParametersConfig:
    """Which parameters are trained, and how."""

    freeze: list[str] = field(
        default_factory=list,
        metadata={
            "help": f"these parameters keep their values: {_PATTERN}, e.g. token_embedding 'layers.[0-3]'",
            "several": True,
            "metavar": "PATTERN",
        },
    )
    decay_embeddings: bool = field(default=True, metadata={"help": "weight decay on embeddings too"})
    layer_lr_decay: float = field(
        default=1.0,
        metadata={
            "help": "each block learns by this factor slower than the one above it, embeddings slowest; 1: all alike"
        },
    )
    lr_scales: list[str] = field(
        default_factory=list,
        metadata={
            "help": f"factor on the learning rate: {_PATTERN}, '=' and the factor, e.g. final_norm=0.1; "
            "of several that match a parameter the last counts",
            "several": True,
            "metavar": "PATTERN=X",
        },
    )
    gradient_multipliers: list[str] = field(
        default_factory=list,
        metadata={
            "help": "factor on the gradient before it is measured and clipped, written as for --lr-scales",
            "several": True,
            "metavar": "PATTERN=X",
        },
    )

    def validate(self) -> Iterator[str]:
        if not 0.0 < self.layer_lr_decay <= 1.0:
            yield f"layer_lr_decay is {self.layer_lr_decay}; it must be in (0, 1]"
        for name in ("lr_scales", "gradient_multipliers"):
            for rule in getattr(self, name):
                pattern, factor = split_rule(rule)
                if not pattern or math.isnan(factor) or math.isinf(factor):
                    yield f"{name}: {rule!r} must be a pattern, '=' and a number, e.g. 'layers.0=0.5'"
                elif name == "lr_scales" and factor <= 0.0:
                    yield f"{name}: the factor of {rule!r} must be above 0; --freeze keeps parameters as they are"


def split_rule(rule: str) -> tuple[str, float]:
    """(pattern, factor) of "PATTERN=FACTOR"; the factor is not a number where none is written."""
    pattern, _, factor = rule.rpartition("=")
    try:
        return pattern.strip(), float(factor)
    except ValueError:
        return pattern.strip(), math.nan
