"""Training: `Trainer(build_run(config)).train()`. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.lazy_names import lazy_names

if TYPE_CHECKING:
    from ftk.trainer.config import TrainConfig
    from ftk.trainer.hooks import Hook, StepInfo
    from ftk.trainer.run import Run, build_run
    from ftk.trainer.trainer import Trainer

__all__ = ["Hook", "Run", "StepInfo", "TrainConfig", "Trainer", "build_run"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ftk.trainer.config": "TrainConfig",
        "ftk.trainer.hooks": "Hook StepInfo",
        "ftk.trainer.run": "Run build_run",
        "ftk.trainer.trainer": "Trainer",
    },
)
