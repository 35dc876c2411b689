"""Loads weights of a checkpoint into another model; chosen names and the size of the vocabulary may differ."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ftk.checkpoint.load import find_weights, names_of_tensors, read_config, read_named, some_names
from ftk.checkpoint.naming import model_tensors
from ftk.checkpoint.quantize import refuse_quantized
from ftk.checkpoint.weights import copy_rows, weights_of
from ftk.errors import UserError
from ftk.model_parallel.collective import collective
from ftk.model_parallel.world import World
from ftk.modules.adapters.adapt import is_part
from ftk.registry import MODELS

_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")


@dataclass(frozen=True)
class Transfer:
    """The result of `transfer_weights`.

    Attributes:
        taken: names of the loaded tensors.
        rows: names of tensors of which only rows were loaded -> (loaded rows, rows of the model).
        copied: names that the checkpoint lacks -> the tensors there of which they are copies.
        fresh: names that the checkpoint lacks and whose initial values are kept.
        skipped: names of the model that match a pattern and keep their initial values.
        unused: names of the checkpoint that match a pattern and are not loaded.
        new: names of an adapter's parts that the checkpoint lacks; they keep their initial values.
        replaced: names of the checkpoint in whose place the model has a classifier.
    """

    taken: list[str]
    rows: dict[str, tuple[int, int]]
    copied: dict[str, str]
    fresh: list[str]
    skipped: list[str]
    unused: list[str]
    new: list[str]
    replaced: list[str]


def transfer_weights(
    folder: str | Path,
    model: nn.Module,
    *,
    skip: Sequence[str] = (),
    common_rows: bool = False,
    parts: Collection[str] = (),
    world: World | None = None,
) -> Transfer:
    """Load the weights of a checkpoint as the initial weights of a new run.

    Sharded tensors take their shards; at most one tensor at a time is read whole, if only rows of it are loaded.

    Args:
        folder: a checkpoint, another program's folder, or a path that `resolve_model` accepts.
        model: not on the meta device.
        skip: patterns (`head.*`, `*.bias`) of names that are not loaded.
        common_rows: if the number of rows (the vocabulary) of a tensor differs, load those that both have.
        parts: of the model's adapter, which the checkpoint may lack; only beside one may its weights be rounded.
        world: as of `load_model_state`.

    Raises:
        BrokenCheckpoint: the checkpoint is not whole; before any weight is changed.
        UserError: names or shapes differ without a pattern in `skip`; before any weight is changed.
    """
    world = world or World.single()
    source, known = find_weights(folder, model, world=world)
    if not parts:
        collective(world, lambda: refuse_quantized(source, "further training without `adapter`"))
    return collective(world, lambda: _fill(source, model, known, skip=skip, common_rows=common_rows, parts=parts))


def _fill(
    folder: Path,
    model: nn.Module,
    known: set[str],
    *,
    skip: Sequence[str],
    common_rows: bool,
    parts: Collection[str],
) -> Transfer:
    """Read this rank's part of a model.

    Args:
        folder: a checkpoint whose files are whole.
        model, skip, common_rows, parts: as of `transfer_weights`.
        known: the names of all ranks' parts.
    """
    wanted, _ = model_tensors(model)
    weights = weights_of(folder)
    stored_names = weights.names

    def is_skipped(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in skip)

    sources: dict[str, str] = {}  # name in the model -> the name it is stored under
    missing, skipped, wrong, fresh, new = [], [], [], [], []
    copied: dict[str, str] = {}
    starts_as: Mapping[str, str | None] = getattr(model, "STARTS_AS", {})
    for name, others in names_of_tensors(model).items():
        stored = next((other for other in others if other in stored_names), None)
        part = next((part for part in starts_as if part in name), "")
        original = name.replace(part, starts_as.get(part) or "") if part else ""
        if any(map(is_skipped, others)):
            skipped.append(name)
        elif stored is not None:
            sources[name] = stored_names[stored]
        elif is_part(name, parts):
            new.append(name)
        elif part and starts_as[part] is None:
            fresh.append(name)
        elif original in stored_names:
            copied[name], sources[name] = original, stored_names[original]
        else:
            missing.append(name)
    only_rows_differ = True
    rows: dict[str, tuple[int, int]] = {}
    for name, stored in sources.items():
        theirs, ours = tuple(weights.tensors[stored].shape), tuple(wanted[name].shape)
        if theirs == ours:
            continue
        if common_rows and ours and theirs and theirs[1:] == ours[1:]:
            rows[name] = (min(theirs[0], ours[0]), ours[0])
        else:
            only_rows_differ = only_rows_differ and bool(ours) and theirs[1:] == ours[1:]
            wrong.append(f"{name} is {list(theirs)} in the checkpoint, {list(ours)} in the model")
    not_in_model = [name for name in stored_names if name not in known]
    unused = [name for name in not_in_model if is_skipped(name)]
    removed = getattr(model, "replaced", ())
    replaced = [name for name in not_in_model if name.partition(".")[0] in removed and name not in unused]
    unexpected = [name for name in not_in_model if name not in unused and name not in replaced]
    unmatched = [
        pattern for pattern in skip if not any(fnmatch.fnmatchcase(name, pattern) for name in [*stored_names, *known])
    ]
    _refuse(folder, model, missing, unexpected, wrong, only_rows_differ, unmatched)
    if rows and has_rows_behind(model):
        raise UserError(
            f"{folder}: a model of {_family(model)} has other rows after those of the vocabulary, which "
            f"`finetune_vocabulary` common would mix up; ftk-checkpoint grow {folder} DST adds tokens in front of them"
        )

    read_named(weights.fill, wanted, {name: stored for name, stored in sources.items() if name not in rows})
    for name, (count, _) in rows.items():
        copy_rows(wanted[name], weights.read(sources[name])[:count])
    taken = [name for name in sources if name not in copied]
    return Transfer(taken, rows, copied, fresh, skipped, unused, new, replaced)


def has_rows_behind(model: Any) -> bool:
    """Whether a model, or what has its `config`, has rows in its token embedding behind those of the vocabulary."""
    config = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None)
    return getattr(config, "embedding_rows", size) != size


def _refuse(
    folder: Path,
    model: nn.Module,
    missing: list[str],
    unexpected: list[str],
    wrong: list[str],
    only_rows_differ: bool,
    unmatched: list[str],
) -> None:
    reasons = []
    if missing:
        reasons.append(f"only the model has {some_names(missing)}")
    if unexpected:
        reasons.append(f"only the checkpoint has {some_names(unexpected)}")
    if wrong:
        hint = ""
        if only_rows_differ and all("position" in name for name in wrong):
            hint = f" (`max_positions` of `ftk-checkpoint grow {folder} DST` writes one with more positions)"
        elif only_rows_differ:
            common = "" if has_rows_behind(model) else "`finetune_vocabulary` common, or "
            hint = f" (a vocabulary of another size: {common}ftk-checkpoint grow)"
        reasons.append(f"{'; '.join(wrong[:4])}{hint}")
    if unmatched:
        reasons.append(f"no name matches {', '.join(unmatched)}")
    if reasons:
        options = read_config(folder).get("model") or {}
        theirs, family = options.get("_name"), _family(model)
        if missing and theirs not in (None, family):
            raise UserError(
                f"{folder}: holds a {theirs}, whose weights do not fit this {family}; leave out `arch`, and the model "
                "is that of the folder"
            )
        if sizes := _other_sizes(options, getattr(model, "config", None)):
            raise UserError(
                f"{folder}: its weights do not fit: {sizes}; leave out `arch` and such options, and the model is that "
                "of the folder"
            )
        raise UserError(
            f"{folder}: its weights do not fit: {'; '.join(reasons)}; `finetune_skip` 'PATTERN' excludes names"
        )


def _other_sizes(stored: Mapping[str, Any], config: Any) -> str:
    """The sizes of the model in which it differs from that of a checkpoint with these options; "" if there is none."""
    differ = [
        f"{name} is {stored[name]} in the checkpoint, {value} in the model"
        for name in _SIZES
        if (value := getattr(config, name, None)) is not None and stored.get(name, value) not in (None, value)
    ]
    return "; ".join(differ)


def _family(model: nn.Module) -> str:
    """The registered name of a model."""
    kind = type(getattr(model, "config", model))
    return next((name for name in MODELS.names() if MODELS.get(name).config is kind), kind.__name__)
