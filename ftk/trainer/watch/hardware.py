"""Peak rates of devices, and peak memory of a run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from ftk.planner.cluster import PEAKS, Peak


def peak_flops(
    option: str, device: torch.device, precision: str, *, name: str | None = None, tf32: bool | None = None
) -> tuple[float, str] | None:
    """The peak rate for MFU.

    Args:
        option: as `peak_tflops`: a number of TFLOP/s, or auto.
        device: where the run computes.
        precision: fp32, bf16 or fp16.
        name: of the device; None: from torch.
        tf32: whether fp32 products are rounded to TF32; None: from torch.

    Returns:
        Operations per second and their source in words; None for an unknown device.
    """
    if option != "auto":
        return float(option) * 1e12, "as given by `peak_tflops`"
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device) if name is None else name
    found = known_peak(name)
    if found is None:
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest" if tf32 is None else tf32
    kind = "half" if precision in ("bf16", "fp16") else "tf32" if tf32 else "fp32"
    rate: float = getattr(found, kind)
    return rate * 1e12, f"data sheet of {name}, {precision if kind == 'half' else kind}, dense"


def known_peak(name: str) -> Peak | None:
    """The peak of a device by torch's name for it, e.g. "NVIDIA A100-SXM4-80GB"."""
    for words, peak in PEAKS.items():
        if all(re.search(rf"(?<![A-Za-z0-9]){word}(?![A-Za-z0-9])", name, re.IGNORECASE) for word in words.split()):
            return peak
    return None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of tensors on a GPU, or of this process on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Peak memory of this process, without its dataloader workers.

    On Linux `ru_maxrss` survives exec, so that a process would report the peak of a larger parent; VmHWM does not.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        status = ""
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    if found:
        return int(found[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
