"""Options that the commands which run a trained model share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.config.common import CommonConfig
from ftk.config.options import options_of
from ftk.errors import UserError

if TYPE_CHECKING:
    from ftk.generation.processors import ProcessorConfig
    from ftk.model_parallel.world import World
    from ftk.tasks.glm_blank import BlankFiller
    from ftk.tasks.glm_blank.infill.config import FillConfig

COLOR: str = field(
    default="auto",
    metadata={
        "help": "filled blanks in the colour of their probability: on a terminal without NO_COLOR (auto), or as said",
        "choices": ("auto", "always", "never"),
    },
)
"""The option --color of commands that print filled text."""


@dataclass(kw_only=True)
class DeviceConfig(CommonConfig):
    """As everywhere, but without a seed of its own: the seed of generation is one of its options."""

    seed: int = field(init=False, default=1)
    ema: bool = field(
        default=False,
        metadata={"help": "take the moving average of the weights, where the run kept one (--ema-decay)"},
    )


@dataclass(kw_only=True)
class DevicePrecisionConfig(DeviceConfig):
    """For commands that generate."""

    precision: str = field(
        default="fp32",
        metadata={
            "help": "of weights, keys and values, and products: bf16 takes half the memory, and is faster where the "
            "processor multiplies it; small weights stay small",
            "choices": ("fp32", "bf16"),
        },
    )


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints' folders, resolved once: a run that saves meanwhile may change its links.

    Attributes:
        model: those of --path.
        language_model: those of --lm-path, if there is one.
    """

    model: list[Path]
    language_model: list[Path] | None = None


def find_checkpoints(path: str, lm_path: str | None, world: World | None = None) -> Checkpoints:
    """The checkpoints that the paths stand for now, the same on all ranks.

    Raises:
        UserError: there is none.
    """
    import os

    from ftk.checkpoint import resolve_checkpoint
    from ftk.hub import checkpoint_paths
    from ftk.model_parallel.collective import on_main

    def find() -> list[list[str] | None]:
        return [
            None if one is None else [os.fspath(resolve_checkpoint(part)) for part in checkpoint_paths(one)]
            for one in (path, lm_path)
        ]

    own, of_lm = (
        None if folders is None else [Path(folder) for folder in folders]
        for folders in (find() if world is None else on_main(world, find))
    )
    assert own is not None, "there is a path"
    return Checkpoints(own, of_lm)


def given_flags(section: str, config: Any, without: Collection[str] = ()) -> list[str]:
    """The flags of the options of a config that differ from their defaults, but for those `without`."""
    values = [(option, getattr(config, option.name)) for option in options_of(section, type(config))]
    return [
        option.flag.replace("--", "--no-", 1) if value is False else option.flag
        for option, value in values
        if option.name not in without and value != option.default
    ]


def open_filler(
    checkpoints: Checkpoints,
    device: DevicePrecisionConfig,
    generation: FillConfig,
    processors: ProcessorConfig,
    world: World | None = None,
) -> BlankFiller:
    """The checkpoints as a filler of blanks, on the requested device, or shared by a world."""
    import dataclasses

    import torch

    from ftk.hub import load_generator
    from ftk.model_parallel.world import resolve_device

    if device.num_threads is not None:
        torch.set_num_threads(device.num_threads)
    dtype = torch.bfloat16 if device.precision == "bf16" else None
    options = {
        one.name: getattr(config, one.name) for config in (generation, processors) for one in dataclasses.fields(config)
    }
    options["lm_path"] = checkpoints.language_model
    return load_generator(
        checkpoints.model, str(resolve_device(device.device)), ema=device.ema, dtype=dtype, world=world, **options
    )


def decode_line(line: bytes) -> str:
    """A prompt from a file or a pipe.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        return line.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start + 1} of the line; convert the file to UTF-8") from None
