"""Handing what the host has made to a device that is at work."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def sent(tensor: Tensor, to: torch.device) -> Tensor:
    """A tensor of the host's on a device, without waiting for it.

    To a GPU it goes by page-locked memory, which PyTorch keeps for the next ones: from other memory the host would wait
    until the GPU has come to the copy.
    """
    if to.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(to, non_blocking=True)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array of the host's on a device, see `sent`."""
    return sent(torch.from_numpy(np.ascontiguousarray(array)), device)
