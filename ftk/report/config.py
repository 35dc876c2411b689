"""Options of a run's reports, besides its log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option


@dataclass(kw_only=True)
class ReportConfig:
    """Where the figures of a run go besides `metrics.jsonl`, and what MFU is measured against."""

    report: bool = option(False, "write report.html into the run's folder, after validations and at the end")
    tensorboard_dir: str | None = option(
        None, "also write the figures for TensorBoard here (ftk[tensorboard])", metavar="PATH"
    )
    wandb_project: str | None = option(
        None,
        "also send the figures to this project of Weights & Biases (ftk[wandb]); WANDB_MODE=offline keeps them on disk",
        metavar="NAME",
    )
    peak_tflops: str = option(
        "auto",
        "rate of matrix products that MFU is a share of: a number, or auto (of known GPUs; no MFU where the device is "
        "unknown)",
        unit="10^12 operations a second",
    )

    def validate(self) -> Iterator[str]:
        if self.peak_tflops == "auto":
            return
        if self.peak_tflops == "measure":
            yield "peak_tflops measure was removed; give auto, or the number of the device's data sheet"
            return
        try:
            good = 0.0 < float(self.peak_tflops) < float("inf")
        except ValueError:
            good = False
        if not good:
            yield f"peak_tflops is {self.peak_tflops!r}; it must be auto or a number above 0"
