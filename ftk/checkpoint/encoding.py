"""Tensors, tuples, NaN and other values that JSON lacks, encoded as JSON and decoded without loss."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import torch

from ftk.errors import naming_place
from ftk.registry import named

_TAGS = ("__tensor__", "__tuple__", "__float__", "__items__")
_DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


def encode(value: Any) -> Any:
    """Return `value` in a form that `json.dumps` writes and `decode` turns back into an equal value.

    Tensors come back on the CPU.

    Raises:
        TypeError: names a value of a type that cannot be saved.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"__float__": repr(value)}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not any(tag in value for tag in _TAGS):
            return {key: encode(item) for key, item in value.items()}
        return {"__items__": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        name = str(value.dtype).removeprefix("torch.")
        return {"__tensor__": base64.b64encode(raw).decode("ascii"), "dtype": name, "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return encode(value.item())
    raise TypeError(
        f"a value of type {type(value).__name__} cannot be saved in a checkpoint: {value!r:.80}; states hold tensors, "
        f"numbers, texts, and lists and dictionaries of these"
    )


def state_to_save(part: Any) -> dict[str, Any]:
    """`state_dict()` of a part of a run.

    Raises:
        UserError: `encode` cannot; names the class of the part.
    """
    state: dict[str, Any] = part.state_dict()
    with naming_place(named(part), TypeError):
        encode(state)
    return state


def decode(value: Any) -> Any:
    """Return what `encode` was given.

    Raises:
        ValueError: `encode` made no such value.
    """
    try:
        return _decode(value)
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"holds a value that ftk did not write ({str(error)[:200]})") from error


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((tag for tag in _TAGS if tag in value), None)
    if tag is None:
        return {key: _decode(item) for key, item in value.items()}
    content = value[tag]
    if tag == "__float__":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
    if tag == "__tuple__":
        return tuple(_decode(item) for item in _list(content))
    if tag == "__items__":
        return {_decode(key): _decode(item) for key, item in map(_list, _list(content))}
    shape = _list(value["shape"])
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise ValueError(f"the shape {shape}")
    raw = np.frombuffer(base64.b64decode(content, validate=True), dtype=np.uint8)
    return torch.from_numpy(raw.copy()).view(_DTYPES[value["dtype"]]).reshape(shape)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{type(value).__name__} in place of a list")
    return value
