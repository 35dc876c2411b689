"""The files of fairseq's checkpoints: which one a path means, and what stands in it.

    {"args": Namespace, "model": state dict, "optimizer_history": [{"num_updates": 100, ...}], ...}
    {"args": None, "cfg": {"model": Namespace or mapping, "task": the same, ...}, "model": state dict, ...}

The second is of fairseq 0.10 and later, where options may be objects of OmegaConf. Sources, in
facebookresearch/fairseq: fairseq/trainer.py (`state_dict`), fairseq/checkpoint_utils.py (files, older content).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ftk.errors import UserError, download_hint
from ftk.models.torch_file import read_tensor_file

_NAMES = ("checkpoint_best.pt", "checkpoint_last.pt")
_PUBLISHED, _DICTIONARIES = "model.pt", "dict*.txt"  # as in the archives of published models


class _Node:
    """Stands for a container or a value of OmegaConf: what it holds is kept, and its class is not looked at."""


# A Namespace and a `_Node` get attributes, nothing else happens; they hold the options. Other objects of these packages
# (meters, enumerations, numbers of NumPy, annotations of OmegaConf) say nothing about the model and are not looked at.
_KEPT = (
    *(f"omegaconf.{name}" for name in ("dictconfig.DictConfig", "listconfig.ListConfig")),
    *(f"omegaconf.nodes.{kind}Node" for kind in ("Any", "String", "Integer", "Float", "Boolean", "Enum")),
    *(f"builtins.{name}" for name in ("dict", "list", "tuple", "set", "int", "float", "str", "bool")),  # annotations
)
_CLASSES: tuple[Any, ...] = (argparse.Namespace, defaultdict, *((_Node, name) for name in _KEPT))
_IGNORED = r"(fairseq|omegaconf|typing|enum|pathlib)\.[\w.]+|numpy\.(_?core\.)?\w+\.scalar|_codecs\.encode"
_ADVICE = (
    'If you trust it, where fairseq is installed, python -c "import torch;'
    " s = torch.load('{name}', 'cpu', weights_only=False);"
    " torch.save({{k: s.get(k) for k in ('args', 'cfg', 'model')}}, 'weights.pt')\" saves what ftk reads"
)
_PLAIN = (bool, int, float, str, list, tuple, type(None))


class Checkpoint(NamedTuple):
    """What is read of one file: the options of model and task in one mapping, and the model's tensors."""

    path: Path
    options: Mapping[str, Any]
    tensors: dict[str, Tensor]
    num_updates: int | None


def is_checkpoint(path: Path) -> bool:
    """Whether a path looks like such a file, or like a folder with some."""
    if path.is_file():
        return path.suffix == ".pt"
    has_published = (path / _PUBLISHED).is_file() and any(path.glob(_DICTIONARIES))
    return has_published or any((path / name).is_file() for name in _NAMES)


def find(source: Path) -> Path:
    """The file itself; of a folder checkpoint_best.pt, else checkpoint_last.pt, else the only one.

    Raises:
        UserError: there is none, or there are several.
    """
    if source.is_file():
        return source
    if not source.is_dir():
        raise UserError(f"{source}: no such file or folder{download_hint(str(source), 'model')}")
    if found := next((source / name for name in _NAMES if (source / name).is_file()), None):
        return found
    others = sorted(source.glob("*.pt"))
    if len(others) != 1:
        what = "holds several .pt files; name one of them" if others else "holds no .pt file, as fairseq saves"
        raise UserError(f"{source}: {what}")
    return others[0]


def read(source: Path) -> Checkpoint:
    """The checkpoint that a path means; tensors are mapped from the file, where possible.

    Raises:
        UserError: there is none, or it is damaged, a part of one, or holds more than data.
    """
    path = find(source)
    content = read_tensor_file(path, _CLASSES, _IGNORED, _ADVICE.format(name=path))
    tensors = content.get("model") if isinstance(content, dict) else None
    if not isinstance(tensors, dict) or not tensors:
        raise UserError(f"{path}: has no state dict under 'model'; is this a checkpoint of fairseq?")
    if "fsdp_metadata" in content or "-shard" in path.stem or "-model_part" in path.stem:
        raise UserError(f"{path}: is one of several parts of a model; ftk reads whole ones")
    if other := next((name for name, tensor in tensors.items() if not _is_named_tensor(name, tensor)), None):
        raise UserError(f"{path}: {other!r:.200} of its state dict is no tensor with a name")
    options = _options(content)
    if not options:
        raise UserError(f"{path}: holds no options, neither under 'args' nor under 'cfg'")
    return Checkpoint(path, options, tensors, _num_updates(content.get("optimizer_history")))


def _is_named_tensor(name: Any, tensor: Any) -> bool:
    return isinstance(name, str) and isinstance(tensor, Tensor)


def _options(content: Mapping[str, Any]) -> dict[str, Any]:
    """The options by name; `arch` and `task` are the names of the architecture and of the task."""
    if old := _fields(content.get("args")):
        return old
    parts = _fields(content.get("cfg"), keep=True)
    model, task = _fields(parts.get("model")), _fields(parts.get("task"))
    names = {"arch": model.get("_name") or model.get("arch"), "task": task.get("_name") or task.get("task")}
    given = {key: value for key, value in model.items() if value is not None}
    return task | given | names if model else {}


def _fields(value: Any, *, keep: bool = False) -> dict[str, Any]:
    """What a Namespace, a mapping or a container of OmegaConf holds; `keep`: objects too."""
    value = _held(value)
    fields = vars(value) if isinstance(value, argparse.Namespace) else value
    if not isinstance(fields, dict):
        return {}
    return {str(key): field if keep else _plain(_held(field)) for key, field in fields.items()}


def _held(value: Any) -> Any:
    return vars(value).get("_content", vars(value).get("_val")) if isinstance(value, _Node) else value


def _plain(value: Any) -> Any:
    """Plain values as they are; no reference to another option, which is that one's value."""
    if isinstance(value, str) and value.startswith("${"):
        return None
    return value if isinstance(value, _PLAIN) else type(value).__name__


def _num_updates(history: Any) -> int | None:
    last = history[-1] if isinstance(history, list) and history else None
    count = last.get("num_updates") if isinstance(last, dict) else None
    return count if type(count) is int and 0 <= count < 1 << 63 else None
