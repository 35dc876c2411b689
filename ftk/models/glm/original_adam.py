"""Adam's moments in checkpoints of the original GLM, which its own change_mp.py drops.

The original keeps `optimizer.state_dict()` of its Adam in each part, parameters by number: first those with weight
decay, then those without (biases and layer norms), each in the order of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftk.models.conversion import ADAM_MOMENTS as MOMENTS
from ftk.models.conversion import ADAM_STEP as STEP
from ftk.models.conversion import AdamState

logger = logging.getLogger(__name__)

StateDict = Mapping[str, Tensor]


def read_original_state(
    parts: Sequence[Mapping[str, Any]], merge: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]], folder: Path
) -> AdamState | None:
    """The optimizer's state of an original checkpoint, its parts merged, in the original's names and layouts.

    Args:
        parts: contents of the files, by rank.
        merge: makes one state dict of those of the parts.
        folder: for messages.

    Returns:
        None if there is none, or one of another form (DeepSpeed's, FP16_Optimizer's, Adafactor's), with a warning.
    """
    if all(part.get("optimizer") is None for part in parts):
        return None
    moments: dict[str, list[dict[str, Tensor]]] = {kind: [] for kind in MOMENTS}
    steps: set[int] = set()
    for part in parts:
        found = _named_state(part)
        if found is None:
            logger.warning("%s: the optimizer's state is not that of torch's Adam; only the weights are read", folder)
            return None
        for kind in MOMENTS:
            moments[kind].append({name: state[kind] for name, state in found.items()})
        steps |= {int(state[STEP]) for state in found.values()}
    if len(steps) != 1:
        logger.warning("%s: its optimizer has taken %s steps; only the weights are read", folder, sorted(steps))
        return None
    groups = parts[0]["optimizer"]["param_groups"]
    decayed, plain = ({key: value for key, value in group.items() if key != "params"} for group in groups)
    return AdamState({kind: merge(states) for kind, states in moments.items()}, steps.pop(), (decayed, plain))


def original_state(
    state: AdamState, num_parts: int, split: Callable[[StateDict, int], list[dict[str, Tensor]]]
) -> list[dict[str, Any]]:
    """What stands under "optimizer" in each part; `state` in the original's names and layouts."""
    pieces = {kind: split(tensors, num_parts) for kind, tensors in state.moments.items()}
    parts = []
    for rank in range(num_parts):
        by_kind = {kind: piece[rank] for kind, piece in pieces.items()}
        decayed, plain = _order(by_kind[MOMENTS[0]])
        numbered = {
            number: {STEP: torch.tensor(float(state.steps)), **{kind: by_kind[kind][name] for kind in MOMENTS}}
            for number, name in enumerate([*decayed, *plain])
        }
        members = (range(len(decayed)), range(len(decayed), len(decayed) + len(plain)))
        groups = [{**options, "params": list(numbers)} for options, numbers in zip(state.options, members, strict=True)]
        parts.append({"state": numbered, "param_groups": groups})
    return parts


def _named_state(part: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """A part's optimizer state by parameter's name; None if it is not of torch's Adam."""
    optimizer = part.get("optimizer")
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("state"), dict):
        return None
    groups = optimizer.get("param_groups")
    if not isinstance(groups, list) or len(groups) != 2:
        return None
    named: dict[str, dict[str, Any]] = {}
    for names, group in zip(_order(part["module"]), groups, strict=True):
        members = group.get("params") if isinstance(group, dict) else None
        if not isinstance(members, list) or len(names) != len(members):
            return None
        for name, number in zip(names, members, strict=True):
            state = optimizer["state"].get(number)
            # Apex's FusedAdam counts its steps in the group.
            state = {STEP: group.get(STEP), **state} if isinstance(state, dict) else {}
            if state.get(STEP) is None or any(
                not isinstance(state.get(kind), Tensor) or state[kind].shape != part["module"][name].shape
                for kind in MOMENTS
            ):
                return None
            named[name] = state
    return {name: named[name] for name in part["module"]}


def _order(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The names of the original's two parameter groups, with weight decay and without."""
    decayed: list[str] = []
    plain: list[str] = []
    for name in names:
        module, _, kind = name.rpartition(".")
        (plain if kind == "bias" or module.endswith("layernorm") else decayed).append(name)
    return decayed, plain
