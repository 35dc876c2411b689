"""Options that the commands which run a trained model share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftk.config.common import CommonConfig
from ftk.errors import UserError

if TYPE_CHECKING:
    from ftk.generation import BlankFiller, GenerationConfig
    from ftk.generation.processors import ProcessorConfig
    from ftk.model_parallel.world import World

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


def open_filler(
    path: str,
    device: DeviceConfig,
    generation: GenerationConfig,
    processors: ProcessorConfig,
    world: World | None = None,
) -> BlankFiller:
    """The checkpoint at `path` as a filler of blanks, on the device that was asked for, or shared by a world."""
    import dataclasses

    import torch

    from ftk.hub import load_generator
    from ftk.trainer.device import resolve_device

    if device.num_threads is not None:
        torch.set_num_threads(device.num_threads)
    options = {
        one.name: getattr(config, one.name) for config in (generation, processors) for one in dataclasses.fields(config)
    }
    return load_generator(path, str(resolve_device(device.device)), ema=device.ema, world=world, **options)


def decode_line(line: bytes) -> str:
    """A prompt from a file or a pipe.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        return line.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start + 1} of the line; convert the file to UTF-8") from None
