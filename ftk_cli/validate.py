"""ftk-validate: the loss of a checkpoint on a split."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from ftk.config import Chosen, compose, section
from ftk.config.flags import shown_default
from ftk.config.options import option, options_of, required
from ftk.data.batches.dataloader_config import DataloaderConfig
from ftk.errors import visible
from ftk.model_parallel.config import InferenceParallelConfig
from ftk.registry import CRITERIONS
from ftk.terminal import bar_width, in_columns
from ftk_cli.command import run, value_of
from ftk_cli.inference_options import MODEL, DeviceConfig, open_ranks, with_sections_of_checkpoint
from ftk_cli.launch import launch

if TYPE_CHECKING:
    from torch import nn

    from ftk.criterions.base import Criterion
    from ftk.model_parallel.world import World
    from ftk.tasks.base import Task
    from ftk.tasks.restore import RestoredParts
    from ftk.trainer.step import Runner

DESCRIPTION = """Evaluates a checkpoint on a split of data that its task reads: loss per target token (nats),
perplexity, and the same for each objective; above them the settings that they depend on. The criterion, its
options and those of the task are the checkpoint's unless you give them (--path PATH --help all shows them). Several
processes (--launch, torchrun) share the batches, and the model if it is given sizes.
Examples: ftk-validate data-bin --path run;
ftk-validate data-bin --path run --seq-length 256;
ftk-validate data-bin --path run --launch 4 --tensor-parallel-size 2"""


@dataclass(kw_only=True)
class ValidateConfig:
    data: str = required(
        "folder written by ftk-preprocess, or rows, as the run read them", positional=True, metavar="DATA", path=True
    )
    path: str = MODEL
    valid_subset: str = option("valid", "split or splits, comma-separated", daily=True)
    batch_size: int = option(16, "samples in a batch", daily=True, min=1, unit="samples")
    num_workers: int = option(0, "processes that prepare batches", min=0, max=1024, unit="processes")
    max_valid_samples: int | None = option(
        None,
        "at most this many samples of each split, the first ones; of several corpora each gives its share",
        daily=True,
        min=1,
        former=("--max-samples",),
        unit="samples",
    )
    seed: int | None = option(None, "of all that is random in the samples; default: the run's", min=0, max=2**63 - 1)
    precision: str = option("fp32", "fp32, or bf16 by autocast", daily=True, choices=("fp32", "bf16"))
    criterion: str | None = option(
        None, "the loss in place of the checkpoint's, with options of its own", metavar="NAME", choices=CRITERIONS.names
    )
    unigram: bool = option(
        False, "also print the loss of the training tokens' unigram distribution, a baseline to beat", daily=True
    )
    train_subset: str = option("train", "split that --unigram counts", needs={"unigram": True})
    output_format: str = option("text", "tables, or one JSON object per split", daily=True, choices=("text", "json"))


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
    sections = partial(_sections, criterion=value_of(argv, "--criterion"))
    root = compose(with_sections_of_checkpoint(ValidateRoot, argv, sections), "ftk-validate", DESCRIPTION, argv)
    if root.common.num_threads is not None:
        import torch

        torch.set_num_threads(root.common.num_threads)
    with open_ranks("ftk-validate", root, root.parallel.of_one_model()) as world:
        return evaluate(root, world)


def _sections(folder: Path, adapter: str | None, criterion: str | None) -> list[tuple[str, type, Any]]:
    """Sections for the options of a checkpoint's task and criterion, whose defaults are the checkpoint's values."""
    from ftk.tasks.restore import restore_objective

    objective = restore_objective(folder, adapter, criterion)
    parts = {"task": objective.task, "criterion": objective.criterion}
    others = {} if criterion is None else {"criterion": ""}  # the checkpoint has no values of that one
    return [
        (
            key,
            _with_defaults(part.config),
            section(f"{key}: {part.name}" + others.get(key, "; defaults are the checkpoint's values")),
        )
        for key, part in parts.items()
        if part.config is not None
    ]


def _with_defaults(config: Any) -> type:
    """The dataclass of `config`, with the values of `config` as its defaults."""
    kind, hints = type(config), get_type_hints(type(config))
    options = [
        (one.name, hints[one.name], field(default_factory=partial(getattr, config, one.name), metadata=one.metadata))
        for one in fields(config)
        if one.init
    ]
    return make_dataclass(kind.__name__, options, bases=(kind,), kw_only=True)


def evaluate(root: ValidateRoot, world: World) -> int:
    """The work of one process: the processes of a data rank share one model and take its share of the batches."""
    from tqdm import tqdm

    from ftk.tasks.data_facts import check_same_data
    from ftk.trainer.dataloading import split_names, valid_iterators, valid_names
    from ftk.trainer.reference import load_reference
    from ftk.trainer.validation import batches_by_corpus, validate

    options = root.validation
    task, parts = _restored(root, world)
    criterion = parts.criterion.build()
    load_reference(criterion, parts.criterion, world)
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
    settings = _settings(root, task, parts)
    if options.output_format == "text":
        given = {name: value for name, value in settings.items() if value is not None and value is not False}
        _print_table({"path": options.path, **{name: _shown(name, value, parts) for name, value in given.items()}})
    for split, iterator in iterators.items():
        num_batches = iterator.batches_of_all_ranks()
        shown = None if world.is_main else True  # where there is a terminal; not at all
        bar = {"desc": split, "unit": "batch", "disable": shown, **bar_width(sys.stderr)}
        batches = tqdm(batches_by_corpus(iterator), total=iterator.batches_left(), **bar)
        options_of_task = {"nats": criterion.nats, "unigram": unigram, "of_scored": task.figures}
        figures = validate(runner, model, batches, world=world, **options_of_task) or {}
        if "num_batches" in figures:
            figures["num_batches"] = num_batches
        figures = {"subset": split, **figures}
        if options.output_format == "json":
            print(json.dumps({**figures, "path": options.path, "settings": settings}))
        else:
            print()
            _print_table(
                {name: f"{value:.4f}" if isinstance(value, float) else str(value) for name, value in figures.items()}
            )
    return 0


def _restored(root: ValidateRoot, world: World) -> tuple[Task, RestoredParts]:
    """The checkpoint's task with the options that are given now; the paths in the options become those of folders."""
    from ftk.checkpoint import resolve_model
    from ftk.checkpoint.weights import IDENTITY_BYTES, identity_files
    from ftk.model_parallel.collective import check_same_files, collective, on_main
    from ftk.tasks.restore import restore_task

    options = root.validation
    # Found once: a run that saves meanwhile moves its links.
    folder = on_main(world, lambda: str(resolve_model(root.common.base or options.path)))
    if root.common.base is None:
        options.path = folder
    else:
        root.common.base = folder
    changes = {key: asdict(getattr(root, key)) for key in ("task", "criterion") if hasattr(root, key)}
    if options.criterion is not None:
        changes["criterion"] = {"_name": options.criterion, **changes.get("criterion", {})}
    changes["common"] = {} if options.seed is None else {"seed": options.seed}
    adapter = None if root.common.base is None else options.path
    task, parts = collective(world, lambda: restore_task(folder, options.data, changes, adapter))
    task.complete_model_config(parts.model.config)  # refuses samples that are longer than the model's positions
    check_same_files(world, {"--path": identity_files(Path(folder))}, IDENTITY_BYTES)
    return task, parts


def load(root: ValidateRoot, world: World, criterion: Criterion) -> tuple[nn.Module, Runner]:
    """This process's part of the model, in most cases all of it, and what takes batches through it."""
    from ftk.hub import load_model
    from ftk.model_parallel.pipeline.inference import PipelinedModel
    from ftk.model_parallel.step_module import StepModule
    from ftk.trainer.step import SequentialRunner

    device, precision = world.device, root.validation.precision
    shared = world.sizes.tensor * world.sizes.pipeline > 1
    path, common = root.validation.path, root.common
    model = load_model(path, device, base=common.base, ema=common.ema, world=world if shared else None)
    if isinstance(model, PipelinedModel):
        return model, model.evaluation_runner(criterion, device, precision)
    return model, SequentialRunner(StepModule(model, criterion), device, precision)


def _settings(root: ValidateRoot, task: Task, parts: RestoredParts) -> dict[str, Any]:
    """All that the figures depend on, but for weights and data; of a part the name under `_name`, and its options."""
    chosen = {"task": parts.task, "criterion": parts.criterion, "dataset": parts.dataset}
    return {
        **{
            key: {"_name": part.name, **({} if part.config is None else asdict(part.config))}
            for key, part in chosen.items()
        },
        "seed": task.seed,
        "max_valid_samples": root.validation.max_valid_samples,
        "precision": root.validation.precision,
        "ema": root.common.ema,
    }


def _shown(name: str, value: Any, parts: RestoredParts) -> str:
    """A setting in the table; of a part the options that are used daily or differ from their defaults."""
    if not isinstance(value, dict):
        return shown_default(value)
    part: Chosen = getattr(parts, name)
    options = [] if part.config is None else options_of(name, type(part.config))
    told = [own for own in options if own.daily or own.positional or value[own.name] != own.default]
    told = [own for own in told if value[own.name] is not None]
    return ", ".join([part.name, *(f"{own.name} {shown_default(value[own.name])}" for own in told)])


def _print_table(rows: dict[str, str]) -> None:
    print("\n".join(in_columns(((name, visible(text)) for name, text in rows.items()), left=(0, 1))))


if __name__ == "__main__":
    raise SystemExit(main())
