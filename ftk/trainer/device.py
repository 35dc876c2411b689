"""Which device a run uses, and in which precision."""

from __future__ import annotations

import torch

from ftk.errors import UserError


def resolve_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means on this machine.

    Raises:
        UserError: no such GPU, or no GPU that this PyTorch can use.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise UserError(f"--device {name}: PyTorch {torch.__version__} finds no GPU; use --device cpu")
        if device.index is not None and device.index >= count:
            raise UserError(f"--device {name}: there are {count} GPUs, cuda:0 to cuda:{count - 1}")
    return device


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of a forward pass: bf16 or fp16 matrix products over fp32 weights, or nothing for fp32."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")
