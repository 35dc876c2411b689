"""Each option of a command with nonsense."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from attacks.harness import Place, case

if TYPE_CHECKING:
    from ftk.config.options import Option

NONSENSE = ("", "-1", "x", "nan", "inf", "1e400", "1e-400", str(10**30), str(-(10**30)), "[1]", "\x1b[2J", "0", "1e9")

Command = Callable[[Place, "list[str]", "list[str]", bool], "list[str]"]


def add_options(room: str, root: type, command: Command, chance: random.Random, *, numbers_only: bool = False) -> None:
    """Add a case for each option of a configuration with a value of `NONSENSE`, drawn again with each seed.

    Args:
        room: what the cases' names begin with.
        root: the dataclass of the command's configuration.
        command: makes the command of (place, flags that choose a part, what the option is given, whether by place).
        numbers_only: whether options that are no numbers are left out.
    """
    for chosen, option in _options(root):
        if numbers_only and option.kind not in (int, float):
            continue
        _add(room, command, chosen, option, chance.choice(NONSENSE))


def _add(room: str, command: Command, chosen: list[str], option: Option, value: str) -> None:
    @case(f"{room}{' '.join([*chosen, option.flag])} {value!r}", codes=(0, 2))
    def _(place: Place) -> list[str]:
        given = [value] if option.positional else [f"{option.flag}={value}"]
        return command(place, chosen, given, option.positional)


def _options(root: type) -> Iterator[tuple[list[str], Option]]:
    """(flags that choose a part, an option) of all sections and parts of a configuration."""
    from ftk.config.options import options_of
    from ftk.config.root import sections_of, slots_of

    for key, (_, config) in sections_of(root).items():
        yield from (([], option) for option in options_of(key, config) if not option.derived)
    for key, slot in slots_of(root).items():
        for name in slot.registry.names():
            choice = "glm_tiny" if key == "model" else name
            config = slot.registry.get(name).config
            for option in options_of(key, config) if config is not None else []:
                if not option.derived:
                    yield [f"{slot.flag}={choice}"], option
