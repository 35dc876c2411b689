"""The configuration of a training run: the root that ftk-train, ftk-hydra-train and config.yaml share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config import Chosen, section, slot
from ftk.config.common import CommandConfig, CommonConfig, LoggingConfig
from ftk.data.batches.dataloader_config import DataloaderConfig
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.optim.ema_config import EMAConfig
from ftk.optim.loss_scale_config import LossScaleConfig
from ftk.optim.parameters_config import ParametersConfig
from ftk.registry import ARCHITECTURES, CRITERIONS, DATASETS, LR_SCHEDULERS, MODELS, OPTIMIZERS, TASKS
from ftk.report.config import ReportConfig
from ftk.trainer.config import CheckpointConfig, TrainingConfig
from ftk.trainer.watch.config import DebugConfig, LRRangeConfig


@dataclass(kw_only=True)
class TrainConfig:
    command: CommandConfig = section("command", saved=False)
    common: CommonConfig = section("common")
    logging: LoggingConfig = section("logging", resume="free")
    task: Chosen = slot(TASKS, flag="--task", default="glm_blank", help="what is learned", resume="dataloader")
    model: Chosen = slot(
        MODELS, flag="--arch", architectures=ARCHITECTURES, help="architecture of the model", short="-a"
    )
    criterion: Chosen = slot(CRITERIONS, flag="--criterion", default_from="task", help="the loss")
    optimizer: Chosen = slot(
        OPTIMIZERS,
        flag="--optimizer",
        default="adamw",
        help="optimizer",
        resume="optimizer",
        resume_of={"lr": "lr_scheduler"},
    )
    lr_scheduler: Chosen = slot(
        LR_SCHEDULERS,
        flag="--lr-scheduler",
        default="cosine",
        help="learning rate over time",
        resume="lr_scheduler",
    )
    parameters: ParametersConfig = section("parameters", resume="optimizer")
    dataset: Chosen = slot(
        DATASETS,
        flag="--dataset",
        default="indexed",
        help="where documents come from",
        place="DATA",
        resume="dataloader",
    )
    dataloader: DataloaderConfig = section("data loading", resume="dataloader")
    training: TrainingConfig = section("training")
    ema: EMAConfig = section("moving average of the weights", resume="free")
    engine: EngineConfig = section("engine", resume="free")
    parallel: ParallelConfig = section("parallel", resume="free")
    loss_scale: LossScaleConfig = section("loss scaling (fp16)", resume="free")
    checkpoint: CheckpointConfig = section("checkpoints", resume="free")
    report: ReportConfig = section("reports", resume="free")
    debug: DebugConfig = section("debugging", resume="free")
    lr_range: LRRangeConfig = section("learning rate range test", saved=False)

    def validate(self) -> Iterator[str]:
        """What concerns several sections at once."""
        limits = (self.training.max_update, self.training.max_epoch)
        if limits == (None, None) and not self.lr_range.lr_range_test:  # which has a length of its own
            yield "the run has no end; give --max-update or --max-epoch"
