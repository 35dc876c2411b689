"""The learning rates of a run: those of its schedule, and of the schedules that groups have of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ftk.optim.lr_schedulers.base import LRScheduler


class GroupSchedules:
    """The schedules of a run as one.

    Args:
        main: the schedule of all groups without one of their own.
        own: the others, by the name that the groups know them by (`schedule` in a parameter group).
    """

    def __init__(self, main: LRScheduler, own: Mapping[str, LRScheduler] | None = None) -> None:
        self.main = main
        self.own = dict(own or {})

    def lr(self, num_updates: int) -> float:
        """The main schedule's rate of the update that comes after `num_updates` updates."""
        return self.main.lr(num_updates)

    def own_lrs(self, num_updates: int) -> dict[str, float]:
        """The rates of the groups' own schedules, by name: what `ftk.optim.base.set_lr` takes as `own`."""
        return {name: schedule.lr(num_updates) for name, schedule in self.own.items()}

    def has_fallen_to(self, lr: float, num_updates: int) -> bool:
        """Whether the main schedule has; see `LRScheduler.has_fallen_to`."""
        return self.main.has_fallen_to(lr, num_updates)

    def observe(self, metric: float, *, num_updates: int | None = None, maximize: bool = False) -> None:
        """Lets all schedules hear a validation metric; see `LRScheduler.observe`."""
        for schedule in (self.main, *self.own.values()):
            schedule.observe(metric, num_updates=num_updates, maximize=maximize)

    def state_dict(self) -> dict[str, Any]:
        """What the schedules remember, JSON-able."""
        own = {name: state for name, schedule in self.own.items() if (state := schedule.state_dict())}
        return self.main.state_dict() | ({"groups": own} if own else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; a group that is new begins anew."""
        main = dict(state)
        own = main.pop("groups", {})
        self.main.load_state_dict(main)
        for name, schedule in self.own.items():
            if name in own:
                schedule.load_state_dict(own[name])


def group_schedules(
    main: LRScheduler, optimizer: torch.optim.Optimizer, total_updates: int | None = None
) -> GroupSchedules:
    """The main schedule with those that an optimizer's groups have of their own.

    Args:
        main: the schedule of `--lr-scheduler`.
        optimizer: offers others by a method `schedules(total_updates)`, if it has any.
        total_updates: length of the run where it is known.

    Raises:
        UserError: a group's schedule needs the length of the run, and there is none.
    """
    offered = getattr(optimizer, "schedules", None)
    return GroupSchedules(main, offered(total_updates) if offered is not None else None)
