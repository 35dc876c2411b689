"""Options that the commands which run a trained model share."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ftk.config import section
from ftk.config.common import CommonConfig
from ftk.config.options import NONE, Option, option, options_of, required, wrong_values
from ftk.errors import UserError
from ftk.generation.config_groups import FILTERS
from ftk.plugins import import_plugins
from ftk.registry import TASKS
from ftk_cli.command import report_errors, value_of
from ftk_cli.progress import say

if TYPE_CHECKING:
    from ftk.generation.config import GenerationConfig
    from ftk.generation.processors import ProcessorConfig
    from ftk.generation.text import TextGenerator
    from ftk.model_parallel.config import ParallelConfig
    from ftk.model_parallel.world import World

R = TypeVar("R")

MODEL_HELP = "checkpoint, a run's folder (its best checkpoint, else its last), or a Hugging Face folder"
MODEL: str = required(MODEL_HELP, daily=True, metavar="PATH")
"""The option --path of commands that run one model."""

ENSEMBLE: str = required(f"{MODEL_HELP}; several with colons between are an ensemble", daily=True, metavar="PATH")
"""The option --path of commands that run several models as one, too."""

COLOR: str = option(
    "auto",
    "answers in the colour of their probability: on a terminal without NO_COLOR (auto), or as said",
    choices=("auto", "always", "never"),
)
"""The option --color of commands that print filled text."""

_PROPOSED = {  # key of generation_config.json -> our option, which takes the same values
    **{"do_sample": "sampling", "num_beams": "beam", "max_new_tokens": "max_len", "min_new_tokens": "min_len"},
    **{name: name for name in (*FILTERS, "repetition_penalty", "no_repeat_ngram_size")},
}


@dataclass(kw_only=True)
class DeviceConfig(CommonConfig):
    """As everywhere, but without a seed of its own: the seed of generation is one of its options."""

    seed: int = field(init=False, default=1)
    base: str | None = option(
        None,
        "where --path is an adapter alone: checkpoint or Hugging Face folder of the model that it was trained beside",
        metavar="PATH",
    )
    ema: bool = option(False, "take the moving average of the weights, where the run kept one (--ema-decay)")


@dataclass(kw_only=True)
class DevicePrecisionConfig(DeviceConfig):
    """For commands that generate."""

    precision: str = option(
        "fp32",
        "of weights, keys and values, and products: bf16 takes half the memory, and is faster where the processor "
        "multiplies it; small weights stay small",
        daily=True,
        choices=("fp32", "bf16"),
    )


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints' folders, resolved once: a run that saves meanwhile may change its links.

    Attributes:
        model: those of --path, or that of --base.
        language_model: those of --lm-path, if there is one.
        adapter: the folder of --path, if there is --base.
    """

    model: list[Path]
    language_model: list[Path] | None = None
    adapter: Path | None = None


@contextmanager
def open_ranks(prog: str, root: Any, sizes: ParallelConfig) -> Iterator[World]:
    """The ranks of a command, of which the main one alone prints; errors are reported before the others fail, too.

    Args:
        root: the command's options, with a section `common`.
        sizes: of the mesh.
    """
    from ftk.model_parallel.same_start import options_by_flag
    from ftk.model_parallel.world import open_world, resolve_device

    device = resolve_device(root.common.device)
    with ExitStack() as stack:
        world = stack.enter_context(open_world(sizes, device, options_by_flag(prog, root)))
        stack.enter_context(report_errors(prog))
        stack.enter_context(world.name_missing_ranks())
        if not world.is_main:
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(silence))
        yield world


def find_checkpoints(
    path: str, lm_path: str | None, world: World | None = None, base: str | None = None
) -> Checkpoints:
    """The checkpoints that the paths resolve to now, the same on all ranks.

    Raises:
        UserError: there is none.
    """
    from ftk.checkpoint import resolve_model
    from ftk.hub import checkpoint_paths
    from ftk.model_parallel.collective import on_main

    def find() -> list[list[str] | None]:
        return [
            None if paths is None else [os.fspath(resolve_model(part)) for part in checkpoint_paths(paths)]
            for paths in (path if base is None else base, lm_path)
        ]

    own, of_lm = (
        None if folders is None else [Path(folder) for folder in folders]
        for folders in (find() if world is None else on_main(world, find))
    )
    assert own is not None, "there is a path"
    return Checkpoints(own, of_lm, None if base is None else Path(path))


def check_same_checkpoints(checkpoints: Checkpoints, world: World) -> None:
    """Raises UserError on all ranks if they see different files in the folders."""
    from ftk.checkpoint.weights import IDENTITY_BYTES, identity_files
    from ftk.model_parallel.collective import check_same_files

    folders = {"--path": checkpoints.model, "--lm-path": checkpoints.language_model or []}
    files = {flag: [file for folder in own for file in identity_files(folder)] for flag, own in folders.items()}
    if checkpoints.adapter is not None:
        files["--path"] += sorted(checkpoints.adapter.glob("*.json"))
    check_same_files(world, files, IDENTITY_BYTES)


def given_flags(section: str, config: Any, without: Collection[str] = ()) -> list[str]:
    """The flags of the options of a config that differ from their defaults, but for those `without`."""
    values = [(option, getattr(config, option.name)) for option in options_of(section, type(config))]
    return [
        option.flag.replace("--", "--no-", 1) if value is False else option.flag
        for option, value in values
        if option.name not in without and value != option.default
    ]


def with_options_of_task(
    root: type[R], argv: Sequence[str], own: Callable[[Path, type], type] = lambda folder, config: config
) -> type[R]:
    """The root with the options of generation of the task of the checkpoint that `--path` names.

    Args:
        root: root dataclass of the command.
        argv: its arguments.
        own: (folder of the checkpoint, dataclass of the task) -> that of the command, with defaults of its own.
    """

    def sections(folder: Path, adapter: str | None) -> list[tuple[str, type, Any]]:
        from ftk.hub import task_of

        task = task_of(folder, adapter)
        return [
            ("generation", own(folder, task.generation_config), section("how to search")),
            ("processors", task.processor_config, section("logits processors")),
        ]

    made = with_sections_of_checkpoint(root, argv, sections)
    elsewhere = {"elsewhere": staticmethod(_options_by_task)}
    return make_dataclass(root.__name__, [], bases=(made,), namespace=elsewhere, kw_only=True)


def _options_by_task() -> dict[str, tuple[type, ...]]:
    """Whose options of generation -> their dataclasses."""
    tasks: dict[str, Any] = {name: TASKS.get(name).target for name in TASKS}
    return {
        f"a model of the task {name}": (task.generation_config, task.processor_config) for name, task in tasks.items()
    }


def with_sections_of_checkpoint(
    root: type[R], argv: Sequence[str], sections: Callable[[Path, str | None], list[tuple[str, type, Any]]]
) -> type[R]:
    """The root with sections that depend on the checkpoint that `--base` or `--path` names; without, as it was.

    Plugins are imported first: the checkpoint's task may be theirs.

    Args:
        root: root dataclass of the command.
        sections: gives key, config dataclass and `section(...)` of each, for the folder of a checkpoint and that of
            a separate adapter, if one is given.

    Raises:
        UserError: there is no such checkpoint, and --help is not given.
    """
    given = [value_of(argv, flag) for flag in ("--path", "--base", "--user-dir")]
    path, base, user_dir = (None if value is None or value.lower() in NONE else value for value in given)
    model = base or path
    if model is None:
        return root
    from ftk.checkpoint import resolve_model
    from ftk.hub import checkpoint_paths

    try:
        import_plugins(user_dir)
        own = sections(resolve_model(checkpoint_paths(model)[0]), path if base else None)
    except UserError:
        if {"-h", "--help", "--version"} & set(argv):
            return root
        raise
    return make_dataclass(root.__name__, own, bases=(root,), kw_only=True)


def open_generator(
    checkpoints: Checkpoints,
    device: DevicePrecisionConfig,
    generation: GenerationConfig,
    processors: ProcessorConfig,
    world: World | None = None,
    adapters: Mapping[str, str] | None = None,
) -> TextGenerator:
    """What answers prompts with the checkpoints, on the device that was asked for, or shared by a world.

    Args:
        checkpoints, device, generation, processors, world: see these.
        adapters: beside the model, as for `ftk.load_generator`.
    """
    import torch

    from ftk.hub import load_generator

    if device.num_threads is not None:
        torch.set_num_threads(device.num_threads)
    dtype = torch.bfloat16 if device.precision == "bf16" else None
    options = {own.name: getattr(config, own.name) for config in (generation, processors) for own in fields(config)}
    if checkpoints.language_model is not None:
        options["lm_path"] = checkpoints.language_model
    path, base = checkpoints.model, None
    if checkpoints.adapter is not None:
        path, base = [checkpoints.adapter], checkpoints.model[0]
    return load_generator(
        path, device.device, base=base, ema=device.ema, dtype=dtype, world=world, adapters=adapters, **options
    )


def say_proposals(
    prog: str,
    argv: Sequence[str],
    checkpoints: Checkpoints,
    generation: GenerationConfig,
    processors: ProcessorConfig,
) -> None:
    """Say which options of generation a model's authors propose, that were not given: ftk searches greedily unless
    it is told otherwise, whoever made the model.

    Args:
        argv: of the command; an option in it is given, be it with its default.
        prog, checkpoints, generation, processors: see these.
    """
    from ftk.checkpoint.hf_names import GENERATION
    from ftk.checkpoint.layout import SOURCE, read_part
    from ftk.files import read_json

    places = (checkpoints.model[0] / name for name in (GENERATION, f"{SOURCE}/{GENERATION}"))
    path = next((place for place in places if place.is_file()), None)
    try:
        theirs = {} if path is None else read_part(path, read_json)
    except UserError as error:  # nothing of it is needed
        say(prog, f"{error}; the options that it may propose are not known")
        return
    if not isinstance(theirs, dict):
        return
    unused = () if theirs.get("do_sample") is True else FILTERS
    values = {name: theirs.get(key) for key, name in _PROPOSED.items() if name not in unused}
    parts = ("generation", generation), ("processors", processors)
    given = {word.partition("=")[0] for word in argv}.union(*(given_flags(*part) for part in parts))
    known = {option.name: (option, config) for section, config in parts for option in options_of(section, type(config))}
    flags = [
        flag
        for name, value in values.items()
        if name in known and given.isdisjoint(known[name][0].flags) and (flag := _proposed(*known[name], value))
    ]
    if flags:
        say(prog, f"{path} proposes {' '.join(flags)}; not applied")


def _proposed(option: Option, config: Any, value: Any) -> str | None:
    """A flag with the value that is proposed for it; None: that is the default, or is not allowed."""
    if type(value) not in ((bool,) if option.kind is bool else (int, float)):
        return None
    try:
        value = option.convert(value)
    except ValueError:
        return None
    if value == option.default or wrong_values(config, {option.name: value}):
        return None
    return option.flag if value is True else f"{option.flag} {value}"
