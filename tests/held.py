"""Memory of tensors: counted operator by operator, and kept for the backward pass."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Held(TorchDispatchMode):
    """Counts the dense tensors made inside, but for those on the meta device; of a sharded one this rank's part.

    Attributes:
        peak: the most bytes that they held at one time.
        copies: copies into tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.copies = 0
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        self.copies += function is torch.ops.aten.copy_.default
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.layout is torch.strided:
                self._note(getattr(tensor, "_local_tensor", tensor).untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def kept_bytes(model: Any, **inputs: Tensor) -> int:
    """Bytes that the forward pass keeps for the backward pass, each storage once, parameters left out."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.hidden_states(**inputs)
    assert hidden.requires_grad
    own = {getattr(one, "_local_tensor", one).untyped_storage().data_ptr() for one in model.parameters()}
    return sum(size for place, size in kept.items() if place not in own)
