"""Finds tensors that are not finite; checked before a save, so that NaN never overwrites a good checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ftk.errors import UserError, counted
from ftk.model_parallel.shards import local

_FLOAT8_BITS = 8  # torch has no kernels for the extremes of these


def non_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors with NaN or infinity, in order; of DTensors this rank's shard is checked.

    Reads each element once without a copy, and waits once for the device.

    Args:
        tensors: by name; integers and tensors on the meta device count as finite.
    """
    asked = {}
    for name, tensor in tensors.items():
        part = local(tensor.detach())
        if part.is_meta or not part.numel() or not (part.is_floating_point() or part.is_complex()):
            continue
        asked[name] = _is_finite(part)
    by_device: dict[torch.device, list[str]] = {}
    for name, answer in asked.items():
        by_device.setdefault(answer.device, []).append(name)
    bad: set[str] = set()
    for names in by_device.values():
        answers = torch.stack([asked[name] for name in names]).tolist()
        bad.update(name for name, is_finite in zip(names, answers, strict=True) if not is_finite)
    return [name for name in asked if name in bad]


def refuse_non_finite(tensors: Mapping[str, torch.Tensor], source: object) -> None:
    """Refuse to convert or export weights that are not finite.

    Args:
        tensors: of a model, by name.
        source: their file or folder, for the message.

    Raises:
        UserError: a tensor is not finite.
    """
    bad = non_finite(tensors)
    if bad:
        raise UserError(f"{source}: {what_is_wrong(bad)}; its training has diverged: take an older checkpoint")


def what_is_wrong(names: Sequence[str]) -> str:
    """A phrase for the result of `non_finite`."""
    more = f" and {counted(len(names) - 1, 'further tensor')}" if len(names) > 1 else ""
    return f"holds NaN or infinity in {names[0]}{more}"


def _is_finite(part: torch.Tensor) -> torch.Tensor:
    """A bool of one element, on the device of `part`."""
    if part.is_complex():
        part = torch.view_as_real(part)
    if torch.finfo(part.dtype).bits <= _FLOAT8_BITS:
        part = part.float()
    if part.ndim == 2 and part.stride(0) < part.stride(1):
        part = part.t()  # in the order of memory: eleven times as fast
    low, high = torch.aminmax(part)  # a NaN is in both
    return torch.isfinite(low) & torch.isfinite(high)
