"""The hooks that look inside a run, built of its options."""

from __future__ import annotations

from torch import nn

from ftk.errors import UserError
from ftk.model_parallel.world import World
from ftk.trainer.anomaly import DetectAnomaly
from ftk.trainer.hooks import Hook
from ftk.trainer.model_inspection import Inspection
from ftk.trainer.nonfinite import SkippedUpdates
from ftk.trainer.profile import Profile
from ftk.trainer.train_config import TrainConfig


def debug_hooks(config: TrainConfig, model: nn.Module, world: World) -> list[Hook]:
    """What the section `debug` asks for, and the watch for skipped updates, which every run has.

    Of several processes the first one is profiled and inspected.

    Raises:
        UserError: an `--inspect` pattern matches nothing, or what is asked for looks at a whole model, and no process
            has one.
    """
    debug = config.debug
    hooks: list[Hook] = [SkippedUpdates()]
    for flag, wanted in (("--inspect-interval", debug.inspect_interval), ("--detect-anomaly", debug.detect_anomaly)):
        if wanted and world.sizes.replicate < world.size:
            raise UserError(
                f"{flag} looks at the whole model, of which each process has a part here; use "
                f"--data-parallel-replicate-size {world.size}, or a smaller model on one process"
            )
    if debug.profile and world.is_main:
        hooks.append(Profile(debug.profile, debug.profile_start))
    if debug.inspect_interval and world.is_main:
        compiled = config.engine.compile == "model"
        hooks.append(Inspection(debug.inspect_interval, debug.inspect, model, compiled=compiled))
    if debug.detect_anomaly:  # the last one: it takes the gradients away
        hooks.append(DetectAnomaly())
    return hooks
