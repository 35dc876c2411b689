"""Handing what the host has made to a device that is at work."""

from __future__ import annotations

from torch import Tensor, device


def sent(tensor: Tensor, to: device) -> Tensor:
    """A tensor of the host's on a device, without waiting for it.

    To a GPU it goes by page-locked memory, which PyTorch keeps for the next ones: from other memory the host would wait
    until the GPU has come to the copy.
    """
    if to.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(to, non_blocking=True)
