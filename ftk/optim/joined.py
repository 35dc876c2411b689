"""Several optimizers behind the interface of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ftk.optim.base import SkippableOptimizer, step_unless


class JoinedOptimizer(SkippableOptimizer):
    """One optimizer for scheduling, stepping, saving and loading; each parameter is updated by its own member.

    `param_groups` are the members' own group dicts one after another, `state` is one mapping that all share, so
    that a rate set here, or a state loaded here, is the member's.

    Args:
        optimizers: with parameters of their own each; at least one.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for member in self.optimizers for group in member.param_groups], {})
        self._share()

    def update_parameters(self, found_inf: Tensor | None) -> None:
        for member in self.optimizers:
            if found_inf is None:
                member.step()
            else:
                step_unless(member, found_inf > 0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores what `load_state_dict` or a copy gives: new groups and a new state, for the members too."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        start = 0
        for member in self.optimizers:
            end = start + len(member.param_groups)
            member.param_groups = self.param_groups[start:end]
            if member.state is not self.state:
                self.state.update(member.state)
                member.state = self.state
            if isinstance(member, JoinedOptimizer):
                member._share()
            start = end


def split_by_member(
    param_groups: list[dict[str, Any]], num_members: int, member_of: Callable[[Tensor, str], int]
) -> list[list[dict[str, Any]]]:
    """For each member of a joined optimizer the groups of the parameters that are its own.

    Args:
        param_groups: as from `ftk.optim.parameter_groups`; without "names" all names are "".
        num_members: how many there are.
        member_of: the place of the member that updates a parameter, by the parameter and its name.
    """
    parts: list[list[dict[str, Any]]] = [[] for _ in range(num_members)]
    for group in param_groups:
        parameters = list(group["params"])
        lists = {"params": parameters, "names": group.get("names", [""] * len(parameters))}
        members = [member_of(*pair) for pair in zip(*lists.values(), strict=True)]
        for place, part in enumerate(parts):
            if place in members:
                own = {key: [v for v, m in zip(lists[key], members, strict=True) if m == place] for key in lists}
                part.append({**group, **{key: values for key, values in own.items() if key in group}})
    return parts
