"""Reduce on plateau: the rate drops when the validation metric has stopped getting better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ftk.optim.lr_schedulers.base import LRScheduler, LRSchedulerConfig
from ftk.registry import register_lr_scheduler


@dataclass(kw_only=True)
class ReduceOnPlateauConfig(LRSchedulerConfig):
    """Options of reduce-on-plateau."""

    lr_shrink: float = field(default=0.1, metadata={"help": "factor of each drop, in (0, 1)"})
    lr_patience: int = field(
        default=0,
        metadata={"help": "validations in a row that may be no better before the rate drops", "unit": "validations"},
    )
    lr_threshold: float = field(default=1e-4, metadata={"help": "by how much a validation must be better to count"})
    lr_threshold_mode: str = field(
        default="rel",
        metadata={
            "help": "the threshold is a share of the best value, or a difference to it",
            "choices": ("rel", "abs"),
        },
    )
    lr_cooldown: int = field(
        default=0, metadata={"help": "validations after a drop that do not count", "unit": "validations"}
    )

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if not 0.0 < self.lr_shrink < 1.0:
            yield f"lr_shrink is {self.lr_shrink}; it must be in (0, 1)"
        for name in ("lr_patience", "lr_threshold", "lr_cooldown"):
            if not getattr(self, name) >= 0:
                yield f"{name} is {getattr(self, name)}; it must be 0 or more"


@register_lr_scheduler("reduce_on_plateau", config=ReduceOnPlateauConfig)
class ReduceOnPlateau(LRScheduler):
    """base_lr * lr_shrink ** (drops until now), the rule of torch's ReduceLROnPlateau.

    Hears `--best-metric` after each validation, the larger the better with `--maximize-best-metric`.
    Validations during the warm-up do not count, as in fairseq. Without a validation the rate never drops.
    """

    def __init__(self, config: ReduceOnPlateauConfig, *, base_lr: float, total_updates: int | None = None) -> None:
        super().__init__(config, base_lr=base_lr, total_updates=total_updates)
        self.config = config
        self.drops = 0
        self.best: float | None = None
        self.validations_without_better = 0
        self.cooldown_left = 0

    def decayed(self, num_decayed: int) -> float:
        return self.base_lr * self.config.lr_shrink**self.drops

    def observe(self, metric: float, *, num_updates: int | None = None, maximize: bool = False) -> None:
        if num_updates is not None and num_updates < self.warmup_updates:
            return
        if self._is_better(metric, maximize):
            self.best = metric
            self.validations_without_better = 0
        else:
            self.validations_without_better += 1
        if self.cooldown_left > 0:
            self.cooldown_left -= 1
            self.validations_without_better = 0
        if self.validations_without_better > self.config.lr_patience:
            self.drops += 1
            self.cooldown_left = self.config.lr_cooldown
            self.validations_without_better = 0

    def _is_better(self, metric: float, maximize: bool) -> bool:
        """Whether `metric` is better than the best until now by the threshold; not a number never is."""
        if self.best is None:
            return metric == metric
        margin = self.config.lr_threshold * (self.best if self.config.lr_threshold_mode == "rel" else 1.0)
        return metric > self.best + margin if maximize else metric < self.best - margin

    def state_dict(self) -> dict[str, Any]:
        return {
            "drops": self.drops,
            "best": self.best,
            "validations_without_better": self.validations_without_better,
            "cooldown_left": self.cooldown_left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; another schedule's state, or none, leaves it as it is at the start."""
        for name in self.state_dict():
            setattr(self, name, state.get(name, getattr(self, name)))
