"""In which type matrix products run."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul_dtype(tensor: Tensor) -> torch.dtype:
    """The type of a matrix product with this tensor: autocast's where it is on, else the tensor's own."""
    device = tensor.device.type
    # torch 2.11 cannot compile is_autocast_available, which is false for meta alone of the devices that we have.
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype
