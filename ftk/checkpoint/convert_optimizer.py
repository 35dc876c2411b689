"""Adam's moments in checkpoints of the original GLM, which its own change_mp.py drops: to ftk's names and back.

The original keeps `optimizer.state_dict()` of its Adam in each part, parameters by number: first those with weight
decay, then those without (biases and layer norms), each in the order of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftk.checkpoint import layout
from ftk.checkpoint.checking import check_files
from ftk.checkpoint.encoding import decode, encode
from ftk.checkpoint.finite import refuse_non_finite
from ftk.checkpoint.load_optimizer import groups_and_scalars
from ftk.checkpoint.snapshot import TensorPart
from ftk.checkpoint.storage import INDEX, TensorIndex, read_index, read_tensors

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"

StateDict = Mapping[str, Tensor]
Renamed = Callable[[StateDict], dict[str, Tensor]]


@dataclass(frozen=True)
class AdamState:
    """The state of an Adam over a whole model.

    Attributes:
        moments: of each of `MOMENTS`: parameter's name -> tensor of its shape.
        steps: number of steps taken, the same for all parameters.
        options: what the two parameter groups have besides members, with weight decay and without.
    """

    moments: dict[str, dict[str, Tensor]]
    steps: int
    options: tuple[dict[str, Any], dict[str, Any]]

    def renamed(self, rename: Renamed) -> AdamState:
        """With the names and layouts that `rename` gives to a state dict of the model."""
        return AdamState({kind: rename(tensors) for kind, tensors in self.moments.items()}, self.steps, self.options)


def read_original_state(
    parts: Sequence[Mapping[str, Any]], merge: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]], folder: Path
) -> AdamState | None:
    """The optimizer's state of an original checkpoint, its parts merged, in the original's names and layouts.

    Args:
        parts: contents of the files, by rank.
        merge: makes one state dict of those of the parts.
        folder: for messages.

    Returns:
        None if there is none, or one of another form (DeepSpeed's, FP16_Optimizer's, Adafactor's): that is said.
    """
    if all(part.get("optimizer") is None for part in parts):
        return None
    moments: dict[str, list[dict[str, Tensor]]] = {kind: [] for kind in MOMENTS}
    steps: set[int] = set()
    for part in parts:
        found = _named_state(part)
        if found is None:
            logger.warning("%s: the optimizer's state is not that of torch's Adam; only the weights are taken", folder)
            return None
        for kind in MOMENTS:
            moments[kind].append({name: state[kind] for name, state in found.items()})
        steps |= {int(state[STEP]) for state in found.values()}
    if len(steps) != 1:
        logger.warning("%s: its optimizer has taken %s steps; only the weights are taken", folder, sorted(steps))
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


def checkpoint_part(state: AdamState) -> TensorPart:
    """The `optimizer/` of an ftk checkpoint; `state` in ftk's names and layouts.

    Its one group has no hyperparameters: a run that goes on from it has its own.
    """
    tensors: dict[str, Tensor] = {}
    names = list(state.moments[MOMENTS[0]])
    for name in names:
        for kind in MOMENTS:
            tensors[f"{name}/{kind}"] = state.moments[kind][name]
        tensors[f"{name}/{STEP}"] = torch.tensor(float(state.steps))
    groups = [{"params": names}]
    extra = {"scalars": {}, "param_groups": encode(groups), "original_groups": encode(list(state.options))}
    return TensorPart(tensors, extra)


def read_checkpoint_part(folder: Path) -> AdamState | None:
    """The Adam of an ftk checkpoint, in ftk's names and layouts.

    Returns:
        None if there is no optimizer in it, or one that keeps something else than Adam: the latter is said.
    """
    if not (folder / layout.OPTIMIZER).is_dir():
        return None
    check_files(folder, prefix=f"{layout.OPTIMIZER}/")
    index = read_index(folder / layout.OPTIMIZER)
    groups, scalars = groups_and_scalars(folder, index)
    names = [name for group in groups for name in group["params"]]
    wanted = {f"{name}/{entry}" for name in names for entry in (*MOMENTS, STEP)}
    if not names or wanted != index.tensors.keys() or scalars:
        logger.warning("%s: its optimizer is no Adam over all parameters; only the weights are written", folder)
        return None
    tensors = {path: torch.empty(stored.shape, dtype=stored.dtype) for path, stored in index.tensors.items()}
    read_tensors(folder / layout.OPTIMIZER, tensors)
    refuse_non_finite(tensors, folder / layout.OPTIMIZER)
    moments = {kind: {name: tensors[f"{name}/{kind}"] for name in names} for kind in MOMENTS}
    if any(tensors[f"{name}/{STEP}"].numel() != 1 for name in names):
        raise layout.BrokenCheckpoint(f"{folder}: a step count of its optimizer is no number")
    steps = {int(tensors[f"{name}/{STEP}"]) for name in names}
    if len(steps) != 1:
        logger.warning("%s: parameters have taken %s steps; only the weights are written", folder, sorted(steps))
        return None
    return AdamState(moments, steps.pop(), _original_options(folder, index, groups))


def _original_options(
    folder: Path, index: TensorIndex, groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the original's two groups, with weight decay and without, have besides members."""
    if "original_groups" in index.extra:
        found = layout.read_part(folder / layout.OPTIMIZER / INDEX, lambda _: decode(index.extra["original_groups"]))
        if not isinstance(found, list) or len(found) != 2 or not all(isinstance(group, dict) for group in found):
            raise layout.BrokenCheckpoint(f"{folder}: what is kept of the original's optimizer is not two groups")
        return found[0], found[1]
    own = {key: value for key, value in groups[0].items() if key in ("lr", "betas", "eps")}
    decays = [group.get("weight_decay") for group in groups]
    if not all(isinstance(decay, (int, float)) for decay in decays):
        raise layout.BrokenCheckpoint(f"{folder}: its optimizer has {decays!r:.80} for weight_decay")
    return {**own, "weight_decay": max(decays)}, {**own, "weight_decay": min(decays)}  # type: ignore[type-var]


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
