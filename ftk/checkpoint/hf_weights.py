"""The weights of a Hugging Face folder: one file or several, safetensors or pickles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftk.checkpoint.index import DTYPES
from ftk.checkpoint.layout import read_part
from ftk.checkpoint.reading import open_safetensors
from ftk.errors import UserError
from ftk.files import read_json
from ftk.models.conversion import HF_INDEX, HF_PICKLED, HF_WEIGHTS
from ftk.models.renames import LazyTensors
from ftk.models.torch_file import read_state_dict

SAFE = ".safetensors"


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a folder: tensors by their names there, and `ftk_names.json` (empty for pickles)."""

    tensors: LazyTensors
    files: dict[str, Any]


def stored_weights(folder: Path) -> StoredWeights:
    """Open the weights of a folder as `transformers` does: safetensors before pickles, one file before several."""
    for name in (HF_WEIGHTS, HF_PICKLED):
        read = _safetensors if name == HF_WEIGHTS else _Pickles().tensors
        if (folder / name).is_file():
            tensors, metadata = read(folder / name)
            files = {name: {"metadata": metadata, "names": list(tensors.described)}}
            return StoredWeights(tensors, files if name == HF_WEIGHTS else {})
        if (folder / f"{name}{HF_INDEX}").is_file():
            return _in_several(folder, f"{name}{HF_INDEX}", read)
    raise UserError(f"{folder}: holds neither {HF_WEIGHTS} nor {HF_PICKLED}, nor an index of several files")


def _in_several(folder: Path, index: str, read: Callable[[Path], tuple[LazyTensors, dict[str, str]]]) -> StoredWeights:
    content = read_part(folder / index, read_json)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / index}: has no weight_map")
    is_safe = index.startswith(HF_WEIGHTS)
    for file in weight_map.values():
        if not is_plain(file) or (is_safe and not file.endswith(SAFE)):
            raise UserError(f"{folder / index}: names {file!r:.80}, which is no file of weights next to it")
    described: dict[str, Tensor] = {}
    readers: dict[str, Callable[[str], Tensor]] = {}
    files: dict[str, Any] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise UserError(f"{folder / index}: names {file}, which is not there")
        tensors, metadata = read(folder / file)
        files[file] = {"metadata": metadata, "names": list(tensors.described)}
        wrong = [name for name in tensors.described if weight_map.get(name) != file]
        wrong += [name for name in weight_map if weight_map[name] == file and name not in tensors.described]
        if wrong:
            raise UserError(f"{folder / index}: does not fit {file} ({wrong[0]!r:.200})")
        described |= tensors.described
        readers |= dict.fromkeys(tensors.described, tensors.read)
    return StoredWeights(LazyTensors(described, lambda name: readers[name](name)), files if is_safe else {})


def _safetensors(path: Path) -> tuple[LazyTensors, dict[str, str]]:
    described = {}
    with open_safetensors(path) as file:
        metadata = dict(file.metadata() or {})
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise UserError(f"{path}: {name} is of type {part.get_dtype()}, which ftk does not read")
            described[name] = torch.empty(part.get_shape(), dtype=DTYPES[part.get_dtype()], device="meta")

    def read(name: str) -> Tensor:
        with open_safetensors(path) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    return LazyTensors(described, read), metadata


class _Pickles:
    """Files that `torch.save` wrote. What is read of one is mapped from it, or in memory; so one at a time is held."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._content: dict[str, Tensor] = {}

    def tensors(self, path: Path) -> tuple[LazyTensors, dict[str, str]]:
        described = LazyTensors.of(self._read(path)).described
        return LazyTensors(described, lambda name: self._read(path)[name]), {}

    def _read(self, path: Path) -> dict[str, Tensor]:
        if path != self._path:
            self._path, self._content = None, {}
            self._path, self._content = path, read_state_dict(path)
        return self._content


def is_plain(name: Any) -> bool:
    """Whether it is the name of a file, without a folder."""
    return isinstance(name, str) and Path(name).name == name and "\0" not in name
