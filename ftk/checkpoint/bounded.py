"""Limits the size of a model to that of its checkpoint, for untrusted configurations."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration

from ftk.checkpoint.index import StoredTensor
from ftk.checkpoint.layout import BrokenCheckpoint

# A model may be built with more elements than are stored: tied weights, and int4 weights with two in a byte.
_TIMES_ELEMENTS = 4
_SPARE_ELEMENTS = 1 << 20
_TIMES_PARTS = 20  # modules, parameters and buffers for each stored tensor
_SPARE_PARTS = 1000


@contextmanager
def bounded_by(stored: Mapping[str, StoredTensor | torch.Tensor], source: object) -> Iterator[None]:
    """Build a model in this block; stop as soon as it has far more parts than the checkpoint has tensors.

    Also needed on the meta device, where a billion layers take no memory for weights, but too much for Python objects.

    Args:
        stored: the tensors, by name.
        source: their checkpoint, for the message.

    Raises:
        BrokenCheckpoint: the model is too large for the tensors, or sizes cannot be those of a model.
    """
    elements = _TIMES_ELEMENTS * sum(torch.Size(tensor.shape).numel() for tensor in stored.values()) + _SPARE_ELEMENTS
    parts = _TIMES_PARTS * len(stored) + _SPARE_PARTS
    thread = threading.get_ident()
    seen: dict[int, Any] = {}  # kept, so that no `id` is given twice

    def register(owner: nn.Module, name: str, part: Any) -> None:
        nonlocal elements, parts
        if part is None or id(part) in seen or threading.get_ident() != thread:
            return
        seen[id(part)] = part
        parts -= 1
        elements -= part.numel() if isinstance(part, torch.Tensor) else 0
        if parts < 0 or elements < 0:
            raise BrokenCheckpoint(
                f"{source}: its configuration describes a model that is far larger than its tensors (at {name!r})"
            )

    hooks = [
        registration.register_module_parameter_registration_hook(register),
        registration.register_module_buffer_registration_hook(register),
        registration.register_module_module_registration_hook(register),
    ]
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        raise BrokenCheckpoint(f"{source}: its model cannot be built ({str(error).splitlines()[0]:.200})") from error
    finally:
        for hook in hooks:
            hook.remove()
