"""Tensors, arrays, bytes, tuples, NaN and other values that JSON lacks, as JSON, exactly and both ways."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import torch

_TAGS = ("__tensor__", "__array__", "__bytes__", "__tuple__", "__float__", "__items__")


def encode(value: Any) -> Any:
    """Return `value` as something `json.dumps` writes and `decode` turns back into an equal value.

    Random-number states are what it is for: `torch.get_rng_state()`, `random.getstate()`, the
    `bit_generator.state` of a NumPy Generator. Tensors come back on the CPU.

    Raises:
        TypeError: names a value of a type that cannot be kept.
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
    if isinstance(value, (bytes, bytearray)):
        return {"__bytes__": _base64(bytes(value))}
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        name = str(value.dtype).removeprefix("torch.")
        return {"__tensor__": _base64(raw), "dtype": name, "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, np.ndarray) and value.dtype != object:
        raw = np.ascontiguousarray(value).tobytes()
        return {"__array__": _base64(raw), "dtype": value.dtype.str, "shape": list(value.shape)}
    raise TypeError(f"a {type(value).__name__} cannot be kept in JSON: {value!r}")


def decode(value: Any) -> Any:
    """Return what `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__float__" in value:
        return float(value["__float__"])
    if "__tuple__" in value:
        return tuple(decode(item) for item in value["__tuple__"])
    if "__items__" in value:
        return {decode(key): decode(item) for key, item in value["__items__"]}
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__tensor__" in value:
        raw = torch.from_numpy(np.frombuffer(base64.b64decode(value["__tensor__"]), dtype=np.uint8).copy())
        return raw.view(getattr(torch, value["dtype"])).reshape(value["shape"])
    if "__array__" in value:
        raw_array = np.frombuffer(base64.b64decode(value["__array__"]), dtype=np.dtype(value["dtype"]))
        return raw_array.reshape(value["shape"]).copy()
    return {key: decode(item) for key, item in value.items()}


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
