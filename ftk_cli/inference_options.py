"""Options that the commands which run a trained model share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftk.config.common import CommonConfig

if TYPE_CHECKING:
    from ftk.generation import BlankFiller, GenerationConfig


@dataclass(kw_only=True)
class DeviceConfig(CommonConfig):
    """As everywhere, but without a seed of its own: the seed of generation is one of its options."""

    seed: int = field(init=False, default=1)


def open_filler(path: str, device: DeviceConfig, generation: GenerationConfig) -> BlankFiller:
    """The checkpoint at `path` as a filler of blanks, on the device that was asked for."""
    import dataclasses

    import torch

    from ftk.hub import load_generator
    from ftk.trainer.device import resolve_device

    if device.num_threads is not None:
        torch.set_num_threads(device.num_threads)
    options = {one.name: getattr(generation, one.name) for one in dataclasses.fields(generation)}
    return load_generator(path, str(resolve_device(device.device)), **options)
