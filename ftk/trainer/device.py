"""Which device a run uses, in which precision, and how a batch gets there."""

from __future__ import annotations

from typing import Any

import torch

from ftk.data.batches.iterator import SAMPLE_IDS
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


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on the device; what is no tensor, and the sample ids, stay where they are.

    To a GPU they go by page-locked memory, which PyTorch keeps for the next batches: from other memory the host would
    wait until the GPU has come to the copy.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()  # itself, if it is
        return tensor.to(device, non_blocking=True)

    return {
        name: moved(value) if isinstance(value, torch.Tensor) and name != SAMPLE_IDS else value
        for name, value in batch.items()
    }


def count_tokens(batch: dict[str, Any]) -> int:
    """Tokens of a batch, padding counted: the size of `tokens`, or of the largest tensor if there is none."""
    tokens = batch.get("tokens")
    if isinstance(tokens, torch.Tensor):
        return tokens.numel()
    return max((value.numel() for value in batch.values() if isinstance(value, torch.Tensor)), default=0)
