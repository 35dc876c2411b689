"""Handing what the host has made to a device that is at work."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ftk.batch import sent


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array of the host's on a device, see `sent`."""
    return sent(torch.from_numpy(np.ascontiguousarray(array)), device)
