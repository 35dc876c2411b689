"""The options of a command by where they come from: its sections, the parts that are chosen, and all that could be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ftk.config.build import as_mapping, chosen_entry, preset, with_default_parts, with_recipe
from ftk.config.options import Option, options_of
from ftk.config.root import Slot, Tree, sections_of, slots_of
from ftk.errors import UserError


@dataclasses.dataclass(frozen=True)
class Group:
    """Options with the heading that they have in --help, and the values they start from if not their defaults."""

    title: str
    options: list[Option]
    presets: Tree = dataclasses.field(default_factory=dict)


def section_groups(root: type, tree: Tree | None = None) -> list[Group]:
    """A group for each section, or for each of the parts that a section is put together from; `tree`: their values."""
    return [
        dataclasses.replace(group, presets=as_mapping(key, (tree or {}).get(key)))
        for key, (section, config) in sections_of(root).items()
        for group in _groups(section.title, config, options_of(key, config))
    ]


def chosen_groups(root: type, tree: Tree, *, complete: bool) -> list[Group]:
    """A group for each part that is chosen, by name or by default. Not `complete`: slots without a choice are left out.

    Raises:
        UserError: a part that does not exist, or where `complete` a choice that is missing.
    """
    groups = []
    tree, _ = with_recipe(root, with_default_parts(root, tree, strict=complete))
    for key, slot in slots_of(root).items():
        values = as_mapping(key, tree.get(key))
        try:
            entry, arch = chosen_entry(key, slot, values)
        except UserError:
            if complete or values:
                raise
            continue
        if entry.config is not None:
            presets = preset(slot, arch) | {k: v for k, v in values.items() if k not in ("_name", "arch")}
            groups.append(Group(f"{key}: {arch or entry.name}", options_of(key, entry.config), presets))
    return groups


def options_by_part(key: str, slot: Slot) -> dict[str, list[Option]]:
    """The options of each part that can be chosen for a slot, by its name; of models, not of their architectures."""
    entries = map(slot.registry.get, slot.registry.names())
    return {entry.name: options_of(key, entry.config) for entry in entries if entry.config is not None}


def options_elsewhere(root: type) -> dict[str, list[Option]]:
    """Options that a command has with other inputs, by whose they are, where its root has an `elsewhere()`.

    That returns whose options they are -> their dataclasses: "a model of the task t" -> (a `GenerationConfig`, ...).
    """
    own = {option.flag for group in section_groups(root) for option in group.options}
    configs: dict[str, tuple[type, ...]] = getattr(root, "elsewhere", dict)()
    return {
        whose: [option for part in parts for option in options_of("generation", part) if option.flag not in own]
        for whose, parts in configs.items()
    }


def owner(slot: Slot, names: list[str]) -> str:
    """What to give for options that the parts of these names have: `--optimizer muon or sgd`."""
    chosen = " or ".join(names)
    return f"{slot.flag} {chosen}" if slot.architectures is None else f"{slot.flag} NAME of the model {chosen}"


def _groups(title: str, config: type, options: list[Option]) -> Iterator[Group]:
    """A section's own options under its title, and those of each base class with a `group_title` under that."""
    names = {
        base.group_title: {field.name for field in dataclasses.fields(base)}
        for base in config.__bases__
        if hasattr(base, "group_title")
    }
    yield Group(title, [option for option in options if not any(option.name in part for part in names.values())])
    for heading, part in names.items():
        yield Group(heading, [option for option in options if option.name in part])
