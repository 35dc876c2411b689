"""Options of loss scaling, used with `--precision fp16`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class LossScaleConfig:
    """How the loss is scaled so that small gradients survive fp16."""

    fp16_init_scale: float = field(
        default=65536.0, metadata={"max": 2.0**127, "help": "factor on the loss at the start"}
    )
    fp16_scale_window: int = field(
        default=2000,
        metadata={"help": "updates in a row without overflow after which the factor doubles", "unit": "updates"},
    )
    fp16_scale_tolerance: float = field(
        default=0.0,
        metadata={
            "help": "share of the updates since the last change of the factor that may overflow before it is halved"
        },
    )
    fp16_min_scale: float = field(
        default=1e-4, metadata={"help": "floor of the factor; an overflow at the floor ends the run"}
    )

    def validate(self) -> Iterator[str]:
        for name in ("fp16_init_scale", "fp16_min_scale"):
            if not getattr(self, name) > 0:
                yield f"{name} is {getattr(self, name)}; it must be above 0"
        if self.fp16_min_scale > self.fp16_init_scale:
            yield f"fp16_min_scale is {self.fp16_min_scale}; it must not be above fp16_init_scale"
        if self.fp16_scale_window < 1:
            yield f"fp16_scale_window is {self.fp16_scale_window}; it must be 1 or more"
        if not 0.0 <= self.fp16_scale_tolerance < 1.0:
            yield f"fp16_scale_tolerance is {self.fp16_scale_tolerance}; it must be in [0, 1)"
