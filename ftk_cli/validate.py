"""ftk-validate: the loss of a checkpoint on a split."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.config import compose, section
from ftk.data.batches.dataloader_config import DataloaderConfig
from ftk.errors import visible
from ftk.model_parallel.config import InferenceParallelConfig
from ftk_cli.command import report_errors, run
from ftk_cli.inference_options import DeviceConfig
from ftk_cli.launch import launch

if TYPE_CHECKING:
    from torch import nn

    from ftk.criterions.base import Criterion
    from ftk.model_parallel.world import World
    from ftk.trainer.step import Runner

DESCRIPTION = """Evaluates a checkpoint on a split of a folder written by ftk-preprocess: loss per target token (nats),
perplexity, and the same for each objective. Several processes (--launch, torchrun) share the batches, and the model
if it is given sizes.
Examples: ftk-validate data-bin --path run;
ftk-validate data-bin --path run --launch 4 --tensor-parallel-size 2"""


@dataclass(kw_only=True)
class ValidateConfig:
    data: str = field(
        metadata={"help": "folder written by ftk-preprocess", "positional": True, "metavar": "DATA", "path": True}
    )
    path: str = field(
        metadata={
            "daily": True,
            "help": "checkpoint, or a run's folder (its best checkpoint, else its last)",
            "metavar": "PATH",
        }
    )
    valid_subset: str = field(default="valid", metadata={"daily": True, "help": "split or splits, comma-separated"})
    batch_size: int = field(
        default=16, metadata={"daily": True, "min": 1, "help": "samples in a batch", "unit": "samples"}
    )
    num_workers: int = field(
        default=0, metadata={"min": 0, "max": 1024, "help": "processes that prepare batches", "unit": "processes"}
    )
    max_valid_samples: int | None = field(
        default=None,
        metadata={
            "daily": True,
            "min": 1,
            "former": ("--max-samples",),
            "help": "at most this many samples of each split",
            "unit": "samples",
        },
    )
    precision: str = field(
        default="fp32", metadata={"daily": True, "help": "fp32, or bf16 by autocast", "choices": ("fp32", "bf16")}
    )
    unigram: bool = field(
        default=False,
        metadata={
            "daily": True,
            "help": "also print the loss of the training tokens' unigram distribution, a baseline to beat",
        },
    )
    train_subset: str = field(
        default="train", metadata={"needs": {"unigram": True}, "help": "split that --unigram counts"}
    )
    output_format: str = field(
        default="text",
        metadata={"daily": True, "help": "a table, or one JSON object per split", "choices": ("text", "json")},
    )


@dataclass(kw_only=True)
class ValidateRoot:
    validation: ValidateConfig = section("validation")
    parallel: InferenceParallelConfig = section("parallel")
    common: DeviceConfig = section("common")


def main(argv: Sequence[str] | None = None) -> int:
    return run("ftk-validate", body, argv)


def body(argv: list[str]) -> int:
    if (code := launch("validate", argv)) is not None:
        return code
    root = compose(ValidateRoot, "ftk-validate", DESCRIPTION, argv)
    import torch

    from ftk.model_parallel.config import ParallelConfig
    from ftk.model_parallel.same_start import options_by_flag
    from ftk.model_parallel.world import open_world, resolve_device

    if root.common.num_threads is not None:
        torch.set_num_threads(root.common.num_threads)
    sizes = ParallelConfig(
        tensor_parallel_size=root.parallel.tensor_parallel_size,
        pipeline_parallel_size=root.parallel.pipeline_parallel_size,
    )
    device = resolve_device(root.common.device)
    facts = options_by_flag("ftk-validate", root)
    with open_world(sizes, device, facts) as world, report_errors("ftk-validate"), world.name_missing_ranks():
        return evaluate(root, world)


def evaluate(root: ValidateRoot, world: World) -> int:
    """The work of one process: the processes of a data rank share one model and take its share of the batches."""
    from tqdm import tqdm

    from ftk.checkpoint import resolve_checkpoint
    from ftk.checkpoint.layout import MANIFEST
    from ftk.model_parallel.collective import check_same_files, collective, on_main
    from ftk.tasks.data_facts import check_same_data
    from ftk.tasks.restore import restore_task
    from ftk.trainer.dataloading import split_names, valid_iterators, valid_names
    from ftk.trainer.validation import validate

    options, device = root.validation, world.device
    # Found once: a run that saves meanwhile moves its links.
    options.path = on_main(world, lambda: str(resolve_checkpoint(options.path)))
    task, parts = collective(world, lambda: restore_task(options.path, options.data))
    check_same_files(world, {"--path": [Path(options.path) / MANIFEST]})
    criterion = parts.criterion.build()
    model, runner = load(root, world, criterion)
    loading = DataloaderConfig(
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        valid_subset=options.valid_subset,
        max_valid_samples=options.max_valid_samples,
        train_subset=options.train_subset,
    )
    check_same_data(task, split_names(loading) if options.unigram else valid_names(loading), world)
    unigram = task.unigram(options.train_subset) if options.unigram and "loss" in criterion.nats else None
    iterators = valid_iterators(loading, root.common, task, rank=world.data_rank, ranks=world.sizes.data)
    for split, iterator in iterators.items():
        num_batches = iterator.batches_of_all_ranks()
        shown = None if world.is_main else True  # where there is a terminal; not at all
        batches = tqdm(iterator.batches(), total=iterator.batches_left(), desc=split, unit="batch", disable=shown)
        figures = (
            validate(runner, model, batches, device=device, world=world, nats=criterion.nats, unigram=unigram) or {}
        )
        if not world.is_main:
            continue
        if "num_batches" in figures:
            figures["num_batches"] = num_batches
        _print({"subset": split, **figures}, options.output_format)
    return 0


def load(root: ValidateRoot, world: World, criterion: Criterion) -> tuple[nn.Module, Runner]:
    """This process's part of the model, in most cases all of it, and what takes batches through it."""
    from ftk.hub import load_model
    from ftk.model_parallel.pipeline.inference import PipelinedModel
    from ftk.model_parallel.step_module import StepModule
    from ftk.trainer.step import SequentialRunner

    device, precision = world.device, root.validation.precision
    shared = world.sizes.tensor * world.sizes.pipeline > 1
    model = load_model(root.validation.path, device, ema=root.common.ema, world=world if shared else None)
    if isinstance(model, PipelinedModel):
        return model, model.evaluation_runner(criterion, device, precision)
    return model, SequentialRunner(StepModule(model, criterion), device, precision)


def _print(figures: dict[str, Any], output_format: str) -> None:
    if output_format == "json":
        print(json.dumps(figures))
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        text = f"{value:.4f}" if isinstance(value, float) else visible(str(value))
        print(f"{name:<{width}}  {text}")


if __name__ == "__main__":
    sys.exit(main())
