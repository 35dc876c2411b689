"""Trained weights on disk: those of a checkpoint, or of another program's folder that is opened as it is.

Such a folder (`layout.resolve_model` says which) is described by its form's `describe`; its tensors are converted one
at a time while they are read, and nothing is written into it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ftk.checkpoint import layout
from ftk.checkpoint.bounded import bounded_by
from ftk.checkpoint.finite import refuse_non_finite
from ftk.checkpoint.index import StoredTensor, read_index
from ftk.checkpoint.reading import read_tensors
from ftk.errors import UserError
from ftk.model_parallel.shards import local, local_pieces
from ftk.models.conversion import Contents, OpenableFormat
from ftk.models.renames import LazyTensors
from ftk.modules.classifier import replace_head
from ftk.modules.initialization import undrawn
from ftk.registry import CONVERTERS, MODELS
from ftk.tokenizers import load_tokenizer
from ftk.tokenizers.base import Tokenizer

_OF_MODEL = (".safetensors", ".bin", ".pt", ".json", ".yaml")  # files that make one
_END = 1 << 16  # bytes

IDENTITY_BYTES = 1 << 24
"""How much of each of the `identity_files` ranks compare: all of a manifest, and the names in a file of tensors."""


class Weights(NamedTuple):
    """The tensors of a model on disk.

    Attributes:
        tensors: name -> shape and dtype.
        names: every name of a tensor, those of tied ones too -> the name in `tensors`.
        fill: fills tensors in place, by their names in `tensors`, in any dtype and on any device; a DTensor takes its
            shards.
    """

    tensors: Mapping[str, StoredTensor | torch.Tensor]
    names: Mapping[str, str]
    fill: Callable[[Mapping[str, torch.Tensor]], None]

    def read(self, name: str) -> torch.Tensor:
        """One of `tensors`, whole, on the CPU, in the type in which it is stored."""
        stored = self.tensors[name]
        tensor = torch.empty(tuple(stored.shape), dtype=stored.dtype)
        self.fill({name: tensor})
        return tensor


def weights_of(folder: Path) -> Weights:
    """The weights of a folder that `layout.resolve_model` found.

    Raises:
        BrokenCheckpoint: the index of a checkpoint is damaged.
        UserError: another program's folder is damaged, or does not fit its configuration; as `convert_from`.
    """
    if layout.is_checkpoint(folder):
        index = read_index(folder / layout.MODEL)
        return Weights(index.tensors, index.names, lambda targets: read_tensors(folder / layout.MODEL, targets))
    contents = foreign_contents(folder)
    check_tensors(contents, folder)
    tensors = finite(contents.tensors, folder)

    def fill(targets: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            copy_rows(target, tensors.read(name))

    return Weights(tensors.described, {name: name for name in tensors.described}, fill)


def foreign_contents(folder: Path) -> Contents:
    """The contents of another program's folder; its tensors are read later."""
    return _form(folder).read(folder)


def foreign_config(folder: Path) -> dict[str, Any]:
    """What would be config.yaml if another program's folder were converted."""
    return sections(_form(folder).describe(folder))


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint, of a data folder, or of another program's folder.

    Raises:
        UserError: there is none, or it is damaged.
    """
    if layout.form_of(folder) is None:
        return load_tokenizer(folder)
    made = _form(folder).describe(folder).own_tokenizer
    if made is None:
        from ftk.tokenizers.hf_files import why_unreadable

        form = layout.form_of(folder)
        why = why_unreadable(folder) if form == "hf" else None
        raise UserError(
            f"{folder}: has no tokenizer that ftk reads as it is{'' if why is None else f' ({why})'}; `ftk-checkpoint "
            f"convert --from {form} {folder} DST --tokenizer NAME --tokenizer-path PATH` adds one"
        )
    return made()


def has_tokenizer(folder: Path) -> bool:
    """Whether `tokenizer_of` finds one in a checkpoint or another program's folder."""
    if layout.form_of(folder) is None:
        return (folder / layout.TOKENIZER).is_dir()
    return _form(folder).describe(folder).own_tokenizer is not None


def identity_files(folder: Path) -> list[Path]:
    """The files by which ranks see whether they read the same weights: their sizes and first bytes say it."""
    if layout.is_checkpoint(folder):
        return [folder / layout.MANIFEST]
    return _form(folder).identity_files(folder)


def digest(folder: Path) -> str:
    """Changes when the weights do; of another program's folder by names, sizes and times of its files."""
    if layout.is_checkpoint(folder):
        return hashlib.sha256((folder / layout.MANIFEST).read_bytes()).hexdigest()
    files = [(path.name, path.stat()) for path in (sorted(folder.iterdir()) if folder.is_dir() else [folder])]
    return hashlib.sha256(
        repr([(name, status.st_size, status.st_mtime_ns) for name, status in files]).encode()
    ).hexdigest()


def fingerprint(folders: Iterable[Path]) -> str:
    """Eight digits that change when models or adapters do: of checkpoints by their manifest, else by the names, sizes
    and ends of files, as to read all of them would take as long as to load them."""
    found = hashlib.sha256()
    for folder in dict.fromkeys(folders):
        if layout.is_checkpoint(folder):
            found.update((folder / layout.MANIFEST).read_bytes())
            continue
        files = folder.rglob("*") if folder.is_dir() else [folder]
        for file in sorted(path for path in files if path.suffix in _OF_MODEL and path.is_file()):
            size = file.stat().st_size
            found.update(f"{file.relative_to(folder)} {size}\n".encode())
            with file.open("rb") as opened:
                opened.seek(max(0, size - _END))
                found.update(opened.read(_END))
    return found.hexdigest()[:8]


def sections(contents: Contents) -> dict[str, Any]:
    """The sections of config.yaml that say what a model is."""
    arch = {} if contents.arch is None else {"arch": contents.arch}
    model = {"_name": contents.model} | arch | dataclasses.asdict(contents.config)
    head = {} if contents.head is None else {layout.HEAD: dataclasses.asdict(contents.head)}
    return {"task": dict(contents.task), "model": model, **head}


def finite(tensors: LazyTensors, source: Path) -> LazyTensors:
    """The same tensors, of which one that holds NaN or infinity is a UserError when it is read."""

    def read(name: str) -> torch.Tensor:
        tensor = tensors.read(name)
        refuse_non_finite({name: tensor}, source)
        return tensor

    return LazyTensors(tensors.described, read)


def check_tensors(contents: Contents, source: Path) -> None:
    """Check names, shapes and kinds of numbers against the model, built on the meta device."""
    described, entry = contents.tensors.described, MODELS.get(contents.model)
    with bounded_by(described, source), torch.device("meta"), undrawn():
        model = entry.target(contents.config)
        if contents.head is not None:
            replace_head(model, contents.head)
        expected = model.state_dict()
    for name in [*expected, *described]:
        if name not in described or name not in expected:
            where = "is missing" if name not in described else "is not in the model"
            raise UserError(f"{source}: the weight that ftk calls {name} {where}")
        if described[name].shape != expected[name].shape:
            found, wanted = list(described[name].shape), list(expected[name].shape)
            raise UserError(f"{source}: the weight that ftk calls {name} is {found}; {wanted} fits the others")
        if described[name].is_floating_point() != expected[name].is_floating_point():
            kind, usual = (str(tensors[name].dtype).removeprefix("torch.") for tensors in (described, expected))
            raise UserError(f"{source}: the weight that ftk calls {name} has numbers of type {kind}, not {usual}")


@torch.no_grad()
def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into the first rows of a tensor; of a sharded one, into this rank's rows and columns."""
    shard = local(target)
    for here, there in local_pieces(target):
        part = source[there]  # a slice ends where the source does
        shard[here][: len(part)].copy_(part)


def _form(folder: Path) -> OpenableFormat:
    entry = CONVERTERS.get(str(layout.form_of(folder)))
    assert entry.config is not None, "forms have options"
    return entry.target(entry.config())
