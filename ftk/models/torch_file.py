"""Files that `torch.save` wrote, read without running anything that is in them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.files import open_regular, reason

_DAMAGED = (ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
_MAX_IGNORED_CLASSES = 64


class IgnoredObject:
    """In the place of an object whose class is ignored: nothing is kept of it."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# Some files contain `numpy.random.get_state()` as well as weights. No array is built from it: a pickle can make NumPy
# treat an array's bytes as pointers to Python objects.
_ARRAYS = [
    (IgnoredObject, f"numpy.{name}")
    for name in ("ndarray", "dtype", "core.multiarray._reconstruct", "_core.multiarray._reconstruct")
]
_SAVE_WEIGHTS = "The program that wrote it can save its weights alone (transformers: `save_pretrained`, as safetensors)"


def read_tensor_file(
    path: Path,
    classes: Collection[type | tuple[type, str]] = (),
    ignored: str = "",
    advice: str = _SAVE_WEIGHTS,
) -> Any:
    """Plain data and tensors of a file; tensors are mapped from it where its form allows that.

    Args:
        path: the file.
        classes: whose objects may be in it besides; what makes one, or fills it, must have no other effect. One with a
            full name stands for the class of that name.
        ignored: pattern of full names of classes. An object of such a class is read as an `IgnoredObject`; the class is
            neither imported nor called.
        advice: what to do about a file with other objects.

    Raises:
        UserError: it cannot be read, or holds other Python objects, which are not unpickled.
    """
    ignored_classes: list[tuple[type, str]] = []
    while True:
        try:
            return _read(path, [*classes, *ignored_classes])
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL ([\w.]+)", str(error))
            if found and re.fullmatch(ignored, found[1]) and len(ignored_classes) < _MAX_IGNORED_CLASSES:
                ignored_classes.append((IgnoredObject, found[1]))
                continue
            what = f" ({found[1]})" if found else ""
            raise UserError(
                f"{path}: holds Python objects besides tensors{what}, or is damaged; ftk does not unpickle those. "
                f"{advice}"
            ) from error
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({reason(error)})") from error
        except _DAMAGED as error:
            why = (str(error) or "it is empty, cut or damaged").splitlines()[0]
            raise UserError(f"{path}: cannot be read as a PyTorch file ({why})") from error


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that holds nothing else, by name.

    Raises:
        UserError: it holds something else, or as of `read_tensor_file`.
    """
    content = read_tensor_file(path)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise UserError(f"{path}: is no state dict")
    return content


def _read(path: Path, allowed: list[Any]) -> Any:
    open_regular(path).close()  # torch would wait at a pipe
    with torch.serialization.safe_globals([*_ARRAYS, *allowed]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
        return torch.load(path, map_location="cpu", weights_only=True)  # written before PyTorch 1.6
