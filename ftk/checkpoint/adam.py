"""Conversion of Adam's moments to and from other programs, without the run's parameter groups."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftk.checkpoint import layout
from ftk.checkpoint.checking import check_files
from ftk.checkpoint.encoding import decode, encode
from ftk.checkpoint.finite import refuse_non_finite
from ftk.checkpoint.index import INDEX, TensorIndex, read_index
from ftk.checkpoint.load_optimizer import groups_and_scalars
from ftk.checkpoint.reading import read_tensors
from ftk.checkpoint.snapshot import TensorPart
from ftk.models.conversion import ADAM_MOMENTS as MOMENTS
from ftk.models.conversion import ADAM_STEP as STEP
from ftk.models.conversion import AdamState

logger = logging.getLogger(__name__)


def checkpoint_part(state: AdamState) -> TensorPart:
    """The `optimizer/` of an ftk checkpoint; `state` has ftk's names and layouts.

    Its only group has no hyperparameters: a run that continues from it uses its own.
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
        None if it has no optimizer, or another one than Adam, which is logged.
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
    """Options of the original's two groups, with and without weight decay."""
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
