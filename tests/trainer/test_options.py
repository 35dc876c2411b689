"""Every check of an option of a run, and what it says."""

from __future__ import annotations

import pytest

from ftk.config.options import mistakes
from ftk.report.config import ReportConfig
from ftk.trainer.config import CheckpointConfig, TrainingConfig
from ftk.trainer.watch.config import LRRangeConfig

PEAK = "it must be auto or a number above 0"
REFUSED = [
    (TrainingConfig(stop_time_hours=0.0), "stop_time_hours is 0.0; it must be above 0"),
    (CheckpointConfig(keep_best=0), "keep_best is 0; it must be 1 or more: the best checkpoint is never removed"),
    (CheckpointConfig(save_dir=""), "save_dir is empty; it must name a folder"),
    (CheckpointConfig(finetune_from="a", restore_from="b"), "weights alone or with a whole state; give one"),
    (LRRangeConfig(lr_range_start=0.0), "lr_range_start is 0.0; it must be above 0"),
    (LRRangeConfig(lr_range_end=1e-8), "lr_range_end is 1e-08; it must be above lr_range_start, 1e-07"),
    *((ReportConfig(peak_tflops=value), PEAK) for value in ("", "fast", "0", "-1", "nan", "inf")),
    (ReportConfig(peak_tflops="measure"), "measure was removed; give auto, or the number of the device's data sheet"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_an_option_out_of_range_is_named(config, message):
    (error,) = mistakes(config)
    assert error.endswith(message)


@pytest.mark.parametrize("value", ["auto", "312", "0.17"])
def test_peaks_that_are_allowed(value):
    assert mistakes(ReportConfig(peak_tflops=value)) == []
