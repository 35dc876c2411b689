"""Peak rates of devices, and peak memory of a run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """Dense rates of matrix products in TFLOP/s by the vendor's data sheet; fp16 and bf16 accumulate in fp32."""

    half: float  # fp16 and bf16
    tf32: float
    fp32: float


# Words of torch's device name -> peak; the first match counts, so longer names come first.
PEAKS: dict[str, Peak] = {
    "B200": Peak(2250.0, 1125.0, 75.0),
    "GH200": Peak(989.4, 494.7, 66.9),
    "H200 NVL": Peak(835.5, 417.7, 60.0),
    "H200": Peak(989.4, 494.7, 66.9),
    "H100 PCIe": Peak(756.0, 378.0, 51.2),
    "H100 NVL": Peak(835.5, 417.7, 60.0),
    "H100": Peak(989.4, 494.7, 66.9),
    "H800 PCIe": Peak(756.0, 378.0, 51.2),
    "H800": Peak(989.4, 494.7, 66.9),
    "H20": Peak(148.0, 74.0, 44.0),
    "A100": Peak(312.0, 156.0, 19.5),
    "A800": Peak(312.0, 156.0, 19.5),
    "A40": Peak(149.7, 74.8, 37.4),
    "A30": Peak(165.0, 82.0, 10.3),
    "A10": Peak(125.0, 62.5, 31.2),
    "L40S": Peak(362.0, 183.0, 91.6),
    "L40": Peak(181.0, 90.5, 90.5),
    "L4": Peak(121.0, 60.0, 30.3),
    "V100": Peak(125.0, 15.7, 15.7),
    "T4": Peak(65.0, 8.1, 8.1),
    "RTX 5090": Peak(209.5, 104.8, 104.8),
    "RTX 4090": Peak(165.2, 82.6, 82.6),
    "RTX 3090": Peak(71.0, 35.6, 35.6),
    "MI300X": Peak(1307.4, 653.7, 163.4),
}


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
