"""The weights of one model as the beginning of another: names may differ by choice, vocabularies, too."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ftk.checkpoint import layout
from ftk.checkpoint.load import load_model_tensors, some_names, tied_names
from ftk.checkpoint.naming import model_tensors
from ftk.checkpoint.quantize import refuse_quantized
from ftk.errors import UserError


@dataclass(frozen=True)
class Transfer:
    """What `transfer_weights` did.

    Attributes:
        taken: names that were filled.
        rows: names of which only rows were filled -> (rows taken, rows of the model).
        skipped: names of the model that keep their initial values because a pattern says so.
        unused: names of the checkpoint that were left out because a pattern says so.
    """

    taken: list[str]
    rows: dict[str, tuple[int, int]]
    skipped: list[str]
    unused: list[str]


def transfer_weights(
    folder: str | Path, model: nn.Module, *, skip: Sequence[str] = (), common_rows: bool = False, ema: bool = False
) -> Transfer:
    """Fill a model with a checkpoint's weights, to begin another training with them.

    Args:
        folder: a checkpoint, or what `resolve_checkpoint` makes one of.
        model: not on the meta device.
        skip: patterns (`head.*`, `*.bias`) of names that keep their initial values, or are not wanted.
        common_rows: where a tensor differs in its number of rows (the vocabulary), take those that both have.
        ema: take the averaged weights.

    Raises:
        BrokenCheckpoint: the checkpoint is not whole; before any weight is changed.
        UserError: names or shapes differ, and `skip` does not say that this is meant; before any weight is changed.
    """
    folder = layout.resolve_checkpoint(folder)
    refuse_quantized(folder, "further training")
    stored = load_model_tensors(folder, ema=ema)
    wanted, _ = model_tensors(model)
    tied = tied_names(model)
    names = {name: tied.get(name, [name]) for name in wanted}

    def meant_to_differ(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in skip)

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    missing, skipped, wrong = [], [], []
    rows: dict[str, tuple[int, int]] = {}
    used = set()
    for name, others in names.items():
        used |= set(others)
        found = next((other for other in others if other in stored), None)
        if any(map(meant_to_differ, others)):
            skipped.append(name)
        elif found is None:
            missing.append(name)
        else:
            target, source = wanted[name], stored[found]
            if target.shape != source.shape:
                if not (common_rows and target.dim() and target.shape[1:] == source.shape[1:] and source.dim()):
                    wrong.append(f"{name} is {list(source.shape)} in the checkpoint, {list(target.shape)} in the model")
                    continue
                count = min(len(target), len(source))
                rows[name] = (count, len(target))
                target, source = target[:count], source[:count]
            pairs[name] = (target, source)
    others_there = [name for name in stored if name not in used]
    unused = [name for name in others_there if meant_to_differ(name)]
    unexpected = [name for name in others_there if not meant_to_differ(name)]
    _refuse(folder, missing, unexpected, wrong, [p for p in skip if not _matches(p, [*stored, *wanted])])
    with torch.no_grad():
        for target, source in pairs.values():
            target.copy_(source)
    return Transfer(list(pairs), rows, skipped, unused)


def _refuse(folder: Path, missing: list[str], unexpected: list[str], wrong: list[str], idle: list[str]) -> None:
    reasons = []
    if missing:
        reasons.append(f"the model has, and it has not: {some_names(missing)}")
    if unexpected:
        reasons.append(f"it has, and the model has not: {some_names(unexpected)}")
    if wrong:
        reasons.append(f"{'; '.join(wrong[:4])} (a vocabulary of another size: --finetune-vocabulary common)")
    if idle:
        reasons.append(f"no name is like {', '.join(idle)}")
    if reasons:
        raise UserError(
            f"{folder}: its weights do not fit: {'; '.join(reasons)}; --finetune-skip 'PATTERN' leaves names out"
        )


def _matches(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)
