"""Differences between a run's saved configuration and the one to resume with, and their consequences."""

from __future__ import annotations

import dataclasses
from typing import Any

from ftk.config.options import MISSING, Option, current_name, options_of
from ftk.config.root import Chosen, Tree, sections_of, slots_of

FREE = "free"
"""Results do not depend on it, or it only decides when the run ends, what it logs and what it keeps."""
RESETTABLE = ("optimizer", "lr_scheduler", "dataloader", "meters")
"""State of this name in the checkpoint depends on it: a change needs that state to be reset."""
FIXED = "fixed"
"""With another value it is another run."""

RESUME = (FREE, *RESETTABLE, FIXED)
"""The classes of options: a field's metadata says `"resume": CLASS`, or its section or slot does."""


@dataclasses.dataclass(frozen=True)
class Change:
    """One option that differs.

    Attributes:
        key: for example "training.update_freq".
        old, new: plain values.
        resume: one of `RESUME`.
    """

    key: str
    old: Any
    new: Any
    resume: str

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.old)} -> {_shown(self.new)}"


def find_changes(before: Tree, config: Any) -> list[Change]:
    """The options that changed, in the order of the configuration.

    An option that is missing in the older tree (written by an older ftk) had its default; one that was removed
    is left out.

    Args:
        before: the tree of a checkpoint or of a config.yaml, as `dump` gave it.
    """
    changes = []
    for section, values, options, resume in _parts(config):
        old = before.get(section)
        if not isinstance(old, dict):
            old = {}
        old = {current_name(name): value for name, value in old.items()}
        for name, new in values.items():
            option = options.get(name)
            default = option.default if option is not None else None
            was = old.get(name, None if default is MISSING else default)
            if name == "_name":
                slot = slots_of(type(config))[section]
                was = slot.registry.current_name(was) if isinstance(was, str) else slot.default
            if option is not None and was == option.former_default and new == default:
                continue
            if was != new and (option is None or name in old or default is not MISSING):
                changes.append(Change(f"{section}.{name}", was, new, resume[name]))
    return changes


def _parts(config: Any) -> list[tuple[str, Tree, dict[str, Option], dict[str, Any]]]:
    """(section's key, plain values, options by name, class by name) of everything that config.yaml holds."""
    parts = []
    for key, (section, config_type) in sections_of(type(config)).items():
        if section.saved:
            options = {option.name: option for option in options_of(key, config_type)}
            resume = {name: option.resume or section.resume for name, option in options.items()}
            parts.append((key, dataclasses.asdict(getattr(config, key)), options, resume))
    for key, slot in slots_of(type(config)).items():
        chosen: Chosen = getattr(config, key)
        values, options = {"_name": chosen.name}, {}
        if chosen.config is not None:
            options = {option.name: option for option in options_of(key, type(chosen.config))}
            values |= dataclasses.asdict(chosen.config)
        # The name of the preset does not matter: its options are compared one by one.
        named = {name: slot.resume_of.get(name, slot.resume) for name in values}
        resume = {name: (options[name].resume if name in options else None) or named[name] for name in values}
        parts.append((key, values, options, resume))
    return parts


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
