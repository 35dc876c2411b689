"""The root of a configuration: a dataclass whose fields are sections (plain) and slots (a registered part).

    @dataclass(kw_only=True)
    class TrainConfig:
        common: CommonConfig = section("common")
        task: Chosen = slot(TASKS, flag="--task")
        model: Chosen = slot(MODELS, flag="--arch", architectures=ARCHITECTURES)

A root with a class attribute `INSTEAD_OF_RECIPE` takes values from the recipe of the chosen architecture: what it maps
an option ("optimizer.lr") to, sections or options, is not taken where the user gives that option.

A root with a static method `base` takes values from a folder: it gets a tree and returns the `Base` of what the tree
leaves open, or None. `BASE_FROM` names the options ("checkpoint.finetune_from") that it reads.

As a plain tree (YAML, Hydra) a section is a mapping, a slot is a mapping with the part's name under `_name`,
and for models the architecture under `arch`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ftk.errors import UserError
from ftk.files import read_yaml, reason
from ftk.plugins import naming_mistakes
from ftk.registry import Entry, Registry, is_plugin, named

R = TypeVar("R")
Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Base:
    """Values that the user leaves open: where they come from, and section key -> values."""

    source: str
    sections: Tree


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A registered part that was chosen, with its options as an instance of its config dataclass.

    `arch` is the architecture whose preset filled the options, `from_recipe` what other sections have from its recipe,
    `base` what this and other sections have from a folder (models only).
    """

    entry: Entry
    config: Any
    arch: str | None = None
    from_recipe: Tree = dataclasses.field(default_factory=dict, compare=False)
    base: Base | None = dataclasses.field(default=None, compare=False)

    @property
    def name(self) -> str:
        return self.entry.name

    def build(self, **runtime: Any) -> Any:
        """The part itself: what was registered, called with its config and the given objects.

        Raises:
            UserError: a plugin's part cannot be built so, or does not have what a part of its kind offers.
        """
        target, options = self.entry.target, () if self.entry.config is None else (self.config,)
        if not is_plugin(target):
            return target(*options, **runtime)
        arguments = ", ".join([*(["config"] if options else []), *(f"{name}=..." for name in runtime)])
        without = "" if options else " (registered without config=)"
        with naming_mistakes(f"{named(target)} cannot be built as {target.__name__}({arguments}){without}"):
            part = target(*options, **runtime)
        self.entry.check(part)
        return part


@dataclasses.dataclass(frozen=True)
class Section:
    """A plain section: `title` heads its group in --help; `saved`: whether it goes into config.yaml.

    `resume` says what a change of its options means when a run is continued, of those that do not say it themselves.
    """

    title: str
    saved: bool = True
    resume: str | None = None


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place for one registered part, chosen by `flag`. `default` None: there must be a choice.

    `default_from` names the slot whose part says which one is usual: the model's `task`, the task's `criterion`.
    With `architectures` the flag chooses an architecture, whose model is the part. `short` is another flag, of one
    letter. `resume` is as of `Section`, `resume_of` the same for options by name; both hold for plugins' parts, too.
    """

    registry: Registry
    flag: str
    default: str | None = None
    architectures: Registry | None = None
    help: str = ""
    short: str | None = None
    resume: str = "fixed"
    resume_of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_from: str | None = None

    @property
    def flags(self) -> list[str]:
        return [self.short, self.flag] if self.short else [self.flag]

    @property
    def choices(self) -> Registry:
        return self.architectures or self.registry


def section(title: str, *, saved: bool = True, resume: str | None = None) -> Any:
    """A field of a root dataclass that holds a plain section; the arguments are those of `Section`."""
    return dataclasses.field(metadata={"section": Section(title, saved, resume)})


def slot(registry: Registry, **options: Any) -> Any:
    """A field of a root dataclass that holds a registered part; the arguments are those of `Slot`."""
    return dataclasses.field(metadata={"slot": Slot(registry, **options)})


def sections_of(root: type) -> dict[str, tuple[Section, type]]:
    """Plain sections of a root dataclass: key -> (section, its config dataclass)."""
    hints = typing.get_type_hints(root)
    fields = dataclasses.fields(root)
    return {f.name: (f.metadata["section"], hints[f.name]) for f in fields if "section" in f.metadata}


def slots_of(root: type) -> dict[str, Slot]:
    """Slots of a root dataclass: key -> slot."""
    return {f.name: f.metadata["slot"] for f in dataclasses.fields(root) if "slot" in f.metadata}


def dump(config: Any) -> Tree:
    """The whole configuration as a tree of plain values, for config.yaml; `compose` reads it back equal."""
    tree: Tree = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Chosen):
            names = {"_name": value.name} | ({"arch": value.arch} if value.arch else {})
            options = dataclasses.asdict(value.config) if value.config is not None else {}
            tree[field.name] = names | options
        elif field.metadata["section"].saved:
            tree[field.name] = dataclasses.asdict(value)
    return tree


def load_yaml(path: str | Path) -> Tree:
    """A YAML mapping from disk, read safely (no Python objects).

    Raises:
        UserError: no such file, larger than 1 MiB, not YAML, or not a mapping.
    """
    tree = load_any_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds no configuration: a mapping of sections is expected")
    return tree


def load_any_yaml(path: str | Path, what: str = "the configuration") -> Any:
    """As `load_yaml`, for a file that may hold anything, such as a list; `what` it is, for messages."""
    try:
        return read_yaml(path)
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {reason(error)}") from error
    except ValueError as error:
        raise UserError(f"{path} {reason(error)}") from error
