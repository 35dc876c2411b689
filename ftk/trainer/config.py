"""The configuration of a training run: the root that ftk-train, ftk-hydra-train and config.yaml share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ftk.config import Chosen, section, slot
from ftk.config.build import as_mapping, preset
from ftk.config.choice import named_lines
from ftk.config.common import CommandConfig, CommonConfig, LoggingConfig
from ftk.config.options import option, options_of
from ftk.config.root import Base, Tree, slots_of
from ftk.criterions.distillation import DistillationConfig
from ftk.data.batches.dataloader_config import DataloaderConfig
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.optim.config import EMAConfig, LossScaleConfig, ParametersConfig
from ftk.registry import (
    ADAPTERS,
    ARCHITECTURES,
    CRITERIONS,
    DATASETS,
    EVALUATIONS,
    LR_SCHEDULERS,
    MODELS,
    OPTIMIZERS,
    TASKS,
)
from ftk.report.config import ReportConfig
from ftk.report.larger_is_better import larger_is_better
from ftk.trainer.watch.config import DebugConfig, LRRangeConfig


@dataclass(kw_only=True)
class TrainingConfig:
    """What an update is, when to validate, when to stop."""

    max_update: int | None = option(
        None, "stop after this many updates", daily=True, resume="free", unit="updates", min=1
    )
    max_epoch: int | None = option(
        None, "stop after this many passes over the data", daily=True, resume="free", unit="epochs", min=1
    )
    stop_time_hours: float | None = option(
        None,
        "stop after this much time; validation, saving and restarts count",
        "(0, inf)",
        resume="free",
        unit="hours",
    )
    stop_min_lr: float | None = option(
        None, "stop when the learning rate has fallen to this value after its warm-up", "(0, inf)", resume="free"
    )
    update_freq: int = option(
        1, "batches of an update; their gradients are added up", daily=True, resume="dataloader", unit="batches", min=1
    )
    clip_norm: float = option(1.0, "gradients are scaled down to this norm; 0: no clipping", resume="optimizer", min=0)
    precision: str = option(
        "fp32",
        "fp32, or bf16 or fp16 by autocast over fp32 weights; fp16 scales the loss",
        daily=True,
        resume="free",
        choices=("fp32", "bf16", "fp16"),
    )
    max_nonfinite_updates: int = option(
        100,
        "stop with an error after this many updates in a row were skipped because loss or gradients were infinite or "
        "NaN; 0: never",
        resume="free",
        unit="updates",
        min=0,
    )
    validate_interval_updates: int = option(
        1000,
        "updates between validations; 0: none (a run always validates at its end, unless `valid_subset` is none)",
        needs={"valid_subset": True},
        resume="free",
        unit="updates",
        min=0,
    )
    validate_interval: int = option(
        1,
        "epochs between validations; 0: none but at the end of the run",
        needs={"valid_subset": True},
        resume="free",
        unit="epochs",
        min=0,
    )
    validate_at_start: bool = option(
        False,
        "validate before the first update of a new run, too: what `finetune_from` can do already; it is checkpoint_0",
        needs={"valid_subset": True},
        resume="free",
    )
    hooks: list[str] = option(
        [],
        "registered hooks, each in quotes with its options: 'NAME option=value ...'",
        resume="free",
        several=True,
        metavar="HOOK",
    )
    patience: int = option(
        0,
        "stop after this many validations in a row without a new best; 0: never",
        needs={"valid_subset": True},
        resume="free",
        unit="validations",
        min=0,
    )


@dataclass(kw_only=True)
class EvaluationsConfig:
    """Evaluations whose metrics are figures of each validation."""

    evaluate_with: list[str] = option(
        [],
        "add metrics of evaluations to validations, named NAME_METRIC (boolq_accuracy): boolq, lambada ... of "
        "ftk-evaluate; one with options in quotes, e.g. 'boolq pattern=4'",
        needs={"valid_subset": True},
        several=True,
        metavar="NAME",
    )
    evaluation_data: list[str] = option(
        [],
        "the files of `evaluate_with`; NAME may be left out where there is one evaluation; default: the rows that the "
        "run validates on",
        needs={"evaluate_with": True},
        several=True,
        path=True,
        metavar="[NAME=]FILE",
    )
    evaluation_limit: int | None = option(
        None, "the first rows of each file alone", needs={"evaluate_with": True}, min=1, unit="rows"
    )

    def validate(self) -> Iterator[str]:
        names = [name for name, _ in named_lines(self.evaluate_with)]
        for name in dict.fromkeys(names):
            if name not in EVALUATIONS:
                yield f"evaluate_with is {name!r}; there are: {', '.join(EVALUATIONS)}"
            if names.count(name) > 1:
                yield f"evaluate_with names {name} more than once; its figures would have the same names"


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where checkpoints are written, how often, and which are kept."""

    save_dir: str = option(
        "checkpoints", "folder of the run; a run found in it is continued", daily=True, metavar="PATH"
    )
    save_interval_updates: int = option(
        1000, "updates between checkpoints; 0: none", needs={"save": True}, unit="updates", min=0
    )
    save_interval: int = option(0, "epochs between checkpoints; 0: none", needs={"save": True}, unit="epochs", min=0)
    save: bool = option(True, "write checkpoints")
    async_save: bool = option(
        True,
        "write checkpoints in the background; training waits only for a copy in memory, which takes as much as "
        "parameters and optimizer state",
        needs={"save": True},
    )
    keep_last: int = option(
        2, "number of newest checkpoints to keep; 0: all", needs={"save": True}, unit="checkpoints", min=0
    )
    keep_best: int = option(1, "number of best checkpoints to keep as well", needs={"save": True}, unit="checkpoints")
    keep_interval_updates: int = option(
        0, "also keep checkpoints at multiples of this; 0: none", needs={"save": True}, unit="updates", min=0
    )
    restore_from: str | None = option(
        None,
        "checkpoint or run folder to start from if save_dir holds none: its whole state, or its weights if it has "
        "only these",
        path=True,
    )
    reset_optimizer: bool = option(
        False, "continue with changed options of the optimizer: its state (moments) is reset"
    )
    reset_lr_scheduler: bool = option(
        False,
        "continue with another learning rate or schedule: the new one applies from the current update, without the "
        "state of the old one",
    )
    reset_dataloader: bool = option(
        False, "continue with changed data, task or batches: the data starts again from epoch 1"
    )
    reset_meters: bool = option(
        False, "continue with another ranking of validations: the best score and patience are reset"
    )
    finetune_from: str | None = option(
        None,
        "checkpoint, run or Hugging Face folder: a new run's initial weights and, by default, `arch`",
        daily=True,
        metavar="PATH",
    )
    finetune_skip: list[str] = option(
        [],
        "names of tensors that are not loaded from `finetune_from`, e.g. 'head.*'",
        needs={"finetune_from": True},
        several=True,
        metavar="PATTERN",
    )
    finetune_vocabulary: str = option(
        "equal",
        "common: if `finetune_from` has another number of rows (a vocabulary of another size), load those that both "
        "have",
        needs={"finetune_from": True},
        choices=("equal", "common"),
    )
    best_metric: str = option(
        "loss", "field of the validation record that ranks checkpoints", needs={"valid_subset": True}, resume="meters"
    )
    maximize_best_metric: bool = option(
        False,
        "larger is better, as it always is of accuracy, f1, em, mcc, correlations, BLEU, chrF and ROUGE",
        needs={"valid_subset": True},
        resume="meters",
    )

    @property
    def maximizes(self) -> bool:
        """Whether checkpoints are the better the larger `best_metric` is."""
        return self.maximize_best_metric or larger_is_better(self.best_metric)

    def validate(self) -> Iterator[str]:
        if self.keep_best < 1:
            yield f"keep_best is {self.keep_best}; it must be 1 or more: the best checkpoint is never removed"
        if not self.save_dir:
            yield "save_dir is empty; it must name a folder"
        if self.finetune_from is not None and self.restore_from is not None:
            yield "finetune_from and restore_from: a run starts with weights alone or with a whole state; give one"


@dataclass(kw_only=True)
class TrainConfig:
    INSTEAD_OF_RECIPE: ClassVar[dict[str, tuple[str, ...]]] = {
        "checkpoint.finetune_from": ("optimizer", "lr_scheduler"),  # which are those of training from scratch
        "lr_scheduler.warmup_updates": ("lr_scheduler.warmup_ratio",),
        "lr_scheduler.min_lr": ("lr_scheduler.min_lr_ratio",),
        "dataloader.max_tokens": ("dataloader.batch_size",),
    }

    BASE_FROM: ClassVar[tuple[str, ...]] = ("checkpoint.finetune_from", "checkpoint.save_dir")

    @staticmethod
    def base(tree: Tree) -> Base | None:
        """Model of `finetune_from`, where the tree names no other, with its task and adapter.

        A run in `save_dir` has them, too: it is continued also where the folder it started from is gone.
        """
        model, checkpoint = (as_mapping(key, tree.get(key)) for key in ("model", "checkpoint"))
        source, save_dir = checkpoint.get("finetune_from"), checkpoint.get("save_dir", CheckpointConfig.save_dir)
        if source is None or model.get("_name") is not None or model.get("arch") is not None:
            return None
        from ftk.checkpoint import read_config
        from ftk.checkpoint.layout import numbered_checkpoints
        from ftk.tasks.restore import restore_base

        gone = not Path(source).exists() and any(
            as_mapping("checkpoint", read_config(folder).get("checkpoint")).get("finetune_from") == source
            for folder in numbered_checkpoints(Path(save_dir))[:1]
        )
        return restore_base(save_dir if gone else source, as_mapping("task", tree.get("task")).get("_name"))

    command: CommandConfig = section("command", saved=False)
    common: CommonConfig = section("common")
    logging: LoggingConfig = section("logging", resume="free")
    task: Chosen = slot(TASKS, flag="--task", default_from="model", help="what is learned", resume="dataloader")
    model: Chosen = slot(
        MODELS, flag="--arch", architectures=ARCHITECTURES, help="architecture of the model", short="-a"
    )
    criterion: Chosen = slot(CRITERIONS, flag="--criterion", default_from="task", help="the loss")
    distillation: DistillationConfig = section("distillation", resume="fixed")
    adapter: Chosen = slot(ADAPTERS, flag="--adapter", default="none", help="small trained part")
    optimizer: Chosen = slot(
        OPTIMIZERS,
        flag="--optimizer",
        default="adamw",
        help="optimizer, or torch.optim.CLASS",
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
        default_from="task",
        help="where documents come from",
        resume="dataloader",
    )
    dataloader: DataloaderConfig = section("data loading", resume="dataloader")
    training: TrainingConfig = section("training")
    evaluations: EvaluationsConfig = section("evaluations in validation", resume="free")
    ema: EMAConfig = section("moving average of the weights", resume="free")
    engine: EngineConfig = section("engine", resume="free")
    parallel: ParallelConfig = section("parallel", resume="free")
    loss_scale: LossScaleConfig = section("loss scaling (fp16)", resume="free")
    checkpoint: CheckpointConfig = section("checkpoints", resume="free")
    report: ReportConfig = section("reports", resume="free")
    debug: DebugConfig = section("debugging", resume="free")
    lr_range: LRRangeConfig = section("learning rate range test", saved=False)

    def validate(self) -> Iterator[str]:
        """Checks across sections."""
        limits = (self.training.max_update, self.training.max_epoch)
        if limits == (None, None) and not self.lr_range.lr_range_test:  # which has its own length
            yield "the run has no end; give `max_update` or `max_epoch`"
        if self.engine.cuda_graphs and self.debug.inspect_interval:
            yield "`cuda_graphs` replays kernels and calls no module, so `inspect_interval` sees none; leave out one"

    @property
    def compute_type(self) -> str:
        """In which type matrices are multiplied: fp32, bf16 or fp16."""
        return "bf16" if self.parallel.weights == "bf16" else self.training.precision


def describe_sources(config: TrainConfig) -> list[str]:
    """What a run has from the folder that it starts from, and the defaults of its architecture: a line for each."""
    model, lines = config.model, []
    if model.base is not None:
        parts = []
        for key, taken in model.base.sections.items():
            part: Chosen = getattr(config, key)
            options = [] if part.entry.config is None else options_of(key, part.entry.config)
            usual = {option.name: option.default for option in options} | preset(slots_of(TrainConfig)[key], part.arch)
            names = [option.name for option in options if option.name in taken and not option.derived]
            changed = {name: taken[name] for name in names if taken[name] != usual[name]}
            parts.append(f"{key} {part.arch or part.name} {_shown(changed)}".rstrip())
        lines.append(f"from {model.base.source}: {'; '.join(parts)}")
    values = {name: value for section in model.from_recipe.values() for name, value in section.items()}
    if values:
        lines.append(f"defaults of {model.arch}: {_shown(values)}")
    return lines


def _shown(values: dict[str, Any]) -> str:
    return " ".join(f"`{name}` {','.join(map(str, v)) if isinstance(v, list) else v}" for name, v in values.items())
