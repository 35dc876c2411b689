"""Learning rate schedules: pure functions of the number of updates done, each with a warm-up and a floor."""

from ftk.optim.lr_schedulers.base import LRScheduler, LRSchedulerConfig

__all__ = ["LRScheduler", "LRSchedulerConfig"]
