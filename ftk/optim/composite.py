"""Groups of parameters by name, each with an optimizer, options and, if wanted, a learning rate schedule of its own.

`optimizer` composite `lr` 3e-4 `groups` 'layers.*.weight = muon lr=0.02 lr_scheduler=cosine' '* = adamw'
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ftk.config import Chosen
from ftk.config.choice import choice
from ftk.errors import UserError
from ftk.optim.base import set_lr
from ftk.optim.joined import JoinedOptimizer, routed
from ftk.optim.optimizers import GROUP_FORM, CompositeConfig
from ftk.optim.patterns import examples, matches
from ftk.optim.schedules import LRScheduler
from ftk.registry import LR_SCHEDULERS, OPTIMIZERS, Entry

_NAMES_SHOWN = 4


@dataclass(frozen=True)
class Rule:
    """One group: the parameters that it takes and what updates them.

    Attributes:
        patterns: shell patterns with commas between, as given; the name of its schedule too.
        optimizer: with its options.
        lr: peak rate of its own; None: that of the composite.
        weight_decay: its own; None: that of the composite.
        schedule: its own; None: the run's.
    """

    patterns: str
    optimizer: Chosen
    lr: float | None
    weight_decay: float | None
    schedule: Chosen | None

    def takes(self, name: str) -> bool:
        return any(matches(name, pattern.strip()) for pattern in self.patterns.split(","))


class Composite(JoinedOptimizer):
    """One optimizer made of several: each parameter belongs to the first group whose pattern matches its name.

    A group's `lr` follows the run's schedule in proportion to `lr`, or the group's own schedule. Its
    `weight_decay` counts for those of its parameters that are decayed at all, so never for biases and norms.

    Args:
        config: the groups, and the rate and decay of those that give none.
        param_groups: as from `ftk.optim.parameter_groups`, with `names`; their `lr_scale` multiplies.
        all_names: of a model of which these are a part (the stage of a pipeline), the names of all trained parameters:
            a group may take its parameters elsewhere.

    Raises:
        UserError: a group that takes no parameter, or a parameter that no group takes.
    """

    def __init__(
        self, config: CompositeConfig, param_groups: list[dict[str, Any]], all_names: Sequence[str] | None = None
    ) -> None:
        self.rules = [parse_rule(text, config) for text in config.groups]
        _check_rules(self.rules, all_names or [name for group in param_groups for name in group["names"]])
        self._lr = config.lr

        def member_of(_: torch.Tensor, name: str) -> int:
            return next(place for place, rule in enumerate(self.rules) if rule.takes(name))

        optimizers: list[torch.optim.Optimizer] = []
        for rule, groups in zip(self.rules, routed(param_groups, len(self.rules), member_of), strict=True):
            if groups:
                own = [{**group, **_rates(rule, group, config)} for group in groups]
                optimizers.append(rule.optimizer.build(param_groups=own))
        super().__init__(optimizers)
        set_lr(self, config.lr, {rule.patterns: self._peak(rule) for rule in self.rules})

    def schedules(self, total_updates: int | None) -> dict[str, LRScheduler]:
        """The schedules that groups have of their own, by the name that the groups use.

        Raises:
            UserError: a schedule needs the length of the run, and there is none.
        """
        return {
            rule.patterns: rule.schedule.build(base_lr=self._peak(rule), total_updates=total_updates)
            for rule in self.rules
            if rule.schedule is not None
        }

    def _peak(self, rule: Rule) -> float:
        return self._lr if rule.lr is None else rule.lr


def parse_rule(text: str, config: CompositeConfig) -> Rule:
    """The group that `PATTERN = OPTIMIZER option=value ...` describes, its options checked.

    Args:
        text: one item of `groups`.
        config: for the rate and the decay where the text gives none.

    Raises:
        UserError: the text is wrong; the message does not name its place.
    """
    patterns, equals, rest = text.partition("=")
    patterns = patterns.strip()
    try:
        name, *pairs = shlex.split(rest)
    except ValueError:
        name, pairs = "", []
    if not equals or not patterns or not name:
        raise UserError(f"cannot be read; {GROUP_FORM}")
    entry = OPTIMIZERS.get(name)
    if entry.name == "composite":
        raise UserError("composite cannot be part of itself; give all groups to the one that there is")
    scheduler = next((pair.partition("=")[2] for pair in pairs if _key(pair) == "lr_scheduler"), None)
    of_schedule = _options(LR_SCHEDULERS.get(scheduler)) if scheduler is not None else set()
    options, given = _options(entry), [_key(pair) for pair in pairs]
    if both := [key for key in given if key in of_schedule and key in options]:
        raise UserError(f"{both[0]} is an option of the optimizer and of the schedule; leave it out")
    preset: dict[str, Any] = {key: getattr(config, key) for key in ("lr", "weight_decay") if key in options}
    own = [pair for pair in pairs if _key(pair) not in of_schedule | {"lr_scheduler"}]
    optimizer = choice(shlex.join([name, *own]), OPTIMIZERS, name, preset)
    schedule = None
    if scheduler is not None:
        own = [scheduler, *(pair for pair in pairs if _key(pair) in of_schedule)]
        schedule = choice(shlex.join(own), LR_SCHEDULERS, scheduler)
    lr, weight_decay = (getattr(optimizer.config, key) if key in given else None for key in ("lr", "weight_decay"))
    return Rule(patterns, optimizer, lr, weight_decay, schedule)


def _key(pair: str) -> str:
    return pair.partition("=")[0].replace("-", "_")


def _options(entry: Entry) -> set[str]:
    return {option.name for option in dataclasses.fields(entry.config)} if entry.config is not None else set()


def _check_rules(rules: list[Rule], names: Sequence[str]) -> None:
    """Check that every rule takes a parameter, and that every parameter is taken."""
    takers = {name: next((place for place, rule in enumerate(rules) if rule.takes(name)), None) for name in names}
    for place, rule in enumerate(rules):
        if place in takers.values():
            continue
        if any(rule.takes(name) for name in names):
            reason = "groups before it take all that it matches; put it further to the front"
            raise UserError(f"`groups` {rule.patterns!r}: {reason}")
        raise UserError(f"`groups` {rule.patterns!r} matches no trained parameter; {examples(rule.patterns, names)}")
    left = [name for name, taker in takers.items() if taker is None]
    if left:
        shown = ", ".join(left[:_NAMES_SHOWN]) + (f" and {len(left) - _NAMES_SHOWN} more" * (len(left) > _NAMES_SHOWN))
        raise UserError(f"`groups`: no group takes {shown}; add one for the rest at the end, such as '* = adamw'")


def _rates(rule: Rule, group: dict[str, Any], config: CompositeConfig) -> dict[str, Any]:
    """What a rule changes in a group."""
    changes: dict[str, Any] = {}
    if rule.weight_decay is not None and group.get("weight_decay", config.weight_decay) != 0.0:
        changes["weight_decay"] = rule.weight_decay
    if rule.schedule is not None:
        changes["schedule"] = rule.patterns
    elif rule.lr is not None and rule.lr != config.lr:
        changes["lr_scale"] = group.get("lr_scale", 1.0) * rule.lr / config.lr
    return changes
