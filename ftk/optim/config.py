"""Options of what is done around an optimizer: which parameters learn and how fast, loss scale, moving average."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option

_PATTERN = "shell pattern of a parameter's or a module's name"


@dataclass(kw_only=True)
class ParametersConfig:
    """Which parameters are trained, and how."""

    freeze: list[str] = option(
        [],
        f"these parameters keep their values: {_PATTERN}, e.g. token_embedding 'layers.[0-3]'",
        several=True,
        metavar="PATTERN",
    )
    decay_embeddings: bool = option(True, "weight decay on embeddings too")
    layer_lr_decay: float = option(
        1.0, "each block learns slower by this factor than the one above, embeddings slowest; 1: all equally", "(0, 1]"
    )
    lr_scales: list[str] = option(
        [],
        f"factor on the learning rate: {_PATTERN}, '=' and the factor, e.g. final_norm=0.1; "
        "of several that match a parameter the last counts",
        several=True,
        metavar="PATTERN=X",
    )
    gradient_multipliers: list[str] = option(
        [],
        "factor on the gradient before it is measured and clipped, written as for `lr_scales`",
        several=True,
        metavar="PATTERN=X",
    )

    def validate(self) -> Iterator[str]:
        for name in ("lr_scales", "gradient_multipliers"):
            for rule in getattr(self, name):
                pattern, factor = split_rule(rule)
                if not pattern or not math.isfinite(factor):
                    yield f"{name}: {rule!r} must be a pattern, '=' and a number, e.g. 'layers.0=0.5'"
                elif name == "lr_scales" and factor <= 0.0:
                    yield f"{name}: the factor of {rule!r} must be above 0; `freeze` keeps parameters as they are"


def split_rule(rule: str) -> tuple[str, float]:
    """(pattern, factor) of "PATTERN=FACTOR"; the factor is not a number where none is written."""
    pattern, _, factor = rule.rpartition("=")
    try:
        return pattern.strip(), float(factor)
    except ValueError:
        return pattern.strip(), math.nan


@dataclass(kw_only=True)
class LossScaleConfig:
    """How the loss is scaled so that small gradients survive fp16 (`precision` fp16)."""

    fp16_init_scale: float = option(
        65536.0, "factor on the loss at the start", "(0, inf)", max=2.0**127, needs={"precision": "fp16"}
    )
    fp16_scale_window: int = option(
        2000,
        "updates in a row without overflow after which the factor doubles",
        "[1, inf)",
        unit="updates",
        needs={"precision": "fp16"},
    )
    fp16_scale_tolerance: float = option(
        0.0,
        "share of the updates since the last change of the factor that may overflow before it is halved",
        "[0, 1)",
        needs={"precision": "fp16"},
    )
    fp16_min_scale: float = option(
        1e-4, "floor of the factor; an overflow at the floor ends the run", "(0, inf)", needs={"precision": "fp16"}
    )

    def validate(self) -> Iterator[str]:
        if self.fp16_min_scale > self.fp16_init_scale:
            yield f"fp16_min_scale is {self.fp16_min_scale}; it must not be above fp16_init_scale"


@dataclass(kw_only=True)
class EMAConfig:
    """Whether an exponential moving average of the weights is kept, and how long it remembers."""

    ema_decay: float = option(
        0.0,
        "keep a moving average of the weights: average = decay * average + rest * weights; 0: none",
        "[0, 1)",
    )
    ema_start_update: int = option(
        0,
        "until this update the average is the weights themselves",
        "[0, inf)",
        unit="updates",
        needs={"ema_decay": True},
    )
    ema_warmup: bool = option(
        True,
        "the decay is at most (1 + n) / (10 + n) n updates after the start, so that it begins short",
        needs={"ema_decay": True},
    )
    ema_interval: int = option(
        1,
        "updates between two updates of the average",
        "[1, inf)",
        unit="updates",
        needs={"ema_decay": True},
    )

    def decay_at(self, num_updates: int) -> float:
        """The decay of the average after `num_updates` updates, at least 1."""
        since = num_updates - self.ema_start_update
        if since <= 0:
            return 0.0
        return min(self.ema_decay, (1 + since) / (10 + since)) if self.ema_warmup else self.ema_decay
