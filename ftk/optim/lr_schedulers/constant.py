"""The constant schedule."""

from __future__ import annotations

from ftk.optim.lr_schedulers.base import LRScheduler, LRSchedulerConfig
from ftk.registry import register_lr_scheduler


@register_lr_scheduler("constant", config=LRSchedulerConfig)
class Constant(LRScheduler):
    """The peak rate for ever."""

    def decayed(self, num_decayed: int) -> float:
        return self.base_lr
