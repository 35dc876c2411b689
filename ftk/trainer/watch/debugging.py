"""The hooks that look inside a run, built of its options."""

from __future__ import annotations

from torch import nn

from ftk.model_parallel.world import World
from ftk.trainer.hooks import Hook
from ftk.trainer.train_config import TrainConfig
from ftk.trainer.watch.anomaly import DetectAnomaly
from ftk.trainer.watch.model_inspection import Inspection
from ftk.trainer.watch.nonfinite import SkippedUpdates
from ftk.trainer.watch.profile import Profile


def debug_hooks(config: TrainConfig, model: nn.Module, world: World) -> list[Hook]:
    """What the section `debug` asks for, and the watch for skipped updates, which every run has.

    Of several processes the first one is profiled; inspected and searched are all of them, together.

    Raises:
        UserError: an `--inspect` pattern matches nothing.
    """
    debug = config.debug
    hooks: list[Hook] = [SkippedUpdates()]
    if debug.profile and world.is_main:
        hooks.append(Profile(debug.profile, debug.profile_start))
    if debug.inspect_interval:
        compiled = config.engine.compile == "model"
        hooks.append(Inspection(debug.inspect_interval, debug.inspect, model, compiled=compiled, world=world))
    if debug.detect_anomaly:  # the last one: it takes the gradients away
        hooks.append(DetectAnomaly())
    return hooks
