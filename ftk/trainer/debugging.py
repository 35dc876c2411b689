"""The hooks that look inside a run, built of its options."""

from __future__ import annotations

from torch import nn

from ftk.trainer.anomaly import DetectAnomaly
from ftk.trainer.hooks import Hook
from ftk.trainer.model_inspection import Inspection
from ftk.trainer.nonfinite import SkippedUpdates
from ftk.trainer.profile import Profile
from ftk.trainer.train_config import TrainConfig


def debug_hooks(config: TrainConfig, model: nn.Module) -> list[Hook]:
    """What the section `debug` asks for, and the watch for skipped updates, which every run has.

    Raises:
        UserError: an `--inspect` pattern matches nothing.
    """
    debug = config.debug
    hooks: list[Hook] = [SkippedUpdates()]
    if debug.profile:
        hooks.append(Profile(debug.profile, debug.profile_start))
    if debug.inspect_interval:
        compiled = config.engine.compile == "model"
        hooks.append(Inspection(debug.inspect_interval, debug.inspect, model, compiled=compiled))
    if debug.detect_anomaly:  # the last one: it takes the gradients away
        hooks.append(DetectAnomaly())
    return hooks
