"""From a tree of plain values to typed dataclasses, with every error reported at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from ftk.config.needs import without_effect
from ftk.config.options import MISSING, Option, current_name, mistakes, options_of, wrong_values
from ftk.config.root import Base, Chosen, Slot, Tree, sections_of, slots_of
from ftk.errors import UserError, nearest, shown
from ftk.registry import Entry, Recipe, named

R = TypeVar("R")


def build(
    root: type[R],
    tree: Tree,
    in_file: Mapping[str, str] | None = None,
    given: Collection[str] = (),
    base: Base | None = None,
) -> R:
    """The typed configuration of a tree.

    Args:
        tree: section key -> values; what is absent takes its default, or its architecture's value.
        in_file: keys of the options whose values come from a YAML file -> the file: mistakes in them are reported by
            their keys, mistakes in others by their flags. None: there is no command line, all are reported by their
            keys.
        given: keys of the options that the user gives now, which must have an effect.
        base: from `base_of`; None: it is read where the tree asks for one.

    Raises:
        UserError: unknown sections, options or names, values of a wrong type or out of range, options that
            must be given and are not, options without effect: all of them, one per line.
    """
    base = base or base_of(root, tree)
    tree, taken = with_base(tree, base)
    tree = with_default_parts(root, tree)
    tree, from_recipe = with_recipe(root, tree)
    errors = unknown_sections(root, tree)
    values: dict[str, Any] = {}
    for key, (_, config_type) in sections_of(root).items():
        values[key] = _build_section(key, config_type, _mapping(key, tree, errors), errors, in_file)
    for key, slot in slots_of(root).items():
        values[key] = chosen = _build_slot(key, slot, _mapping(key, tree, errors), errors, in_file)
        if chosen is not None and slot.architectures is not None:
            values[key] = dataclasses.replace(chosen, from_recipe=from_recipe, base=taken)
    if not errors:
        config = root(**values)
        errors.extend(mistakes(config))
        errors.extend(without_effect(config, given, by_flag=in_file is not None))
    if errors:
        sources = dict(in_file or {})
        if from_recipe and (entry := _architecture(root, tree)) is not None:
            whose = f"the recipe of architecture {entry.name!r}, {named(entry.target)}"
            for key, recipe in from_recipe.items():
                for name in recipe:
                    sources |= {f"{key}.{name}": whose, f"--{name.replace('_', '-')}": whose}
        raise UserError(report([_with_source(error, sources) for error in errors]))
    return config


def _with_source(error: str, sources: Mapping[str, str]) -> str:
    """A message that begins with an option, behind the file or the recipe that its value is from."""
    first = error.removeprefix("unknown ").removeprefix("option ").split()[0].rstrip(";:")
    return f"{sources[first]}: {error}" if first in sources else error


def unknown_sections(root: type, tree: Tree) -> list[str]:
    """An error message for each top-level key that is not a section; for an option, it names the option's section."""
    known = [*sections_of(root), *slots_of(root)]
    unknown = [key for key in tree if key not in known]
    if {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"} & set(unknown):
        return [
            "this is DeepSpeed's configuration; give `data_parallel_shard_size`, `zero_stage`, `batch_size` ... instead"
        ]
    sections = sections_of_options(root) if unknown else {}
    return [
        f"{key} is an option, not a section; write it under {' or '.join(f'{section}:' for section in sections[key])}"
        if key in sections
        else _unknown("section", key, known)
        for key in unknown
    ]


def sections_of_options(root: type) -> dict[str, list[str]]:
    """Every option that a root can have -> the sections, or slots, that it stands in."""
    sections: dict[str, list[str]] = {}
    parts = [(key, config) for key, (_, config) in sections_of(root).items()]
    for key, slot in slots_of(root).items():
        if slot.architectures is not None:
            sections["arch"] = [key]
        parts += [(key, config) for name in slot.registry.names() if (config := slot.registry.get(name).config)]
    for key, config in parts:
        for field in dataclasses.fields(config):
            if key not in sections.setdefault(field.name, []):
                sections[field.name].append(key)
    return sections


def build_options(key: str, config_type: type, values: Tree) -> Any:
    """The options of one part as its dataclass.

    Args:
        key: what they are called in messages.
        values: option -> value; what is absent takes its default.

    Raises:
        UserError: all that is wrong, one per line.
    """
    errors: list[str] = []
    config = _build_section(key, config_type, values, errors)
    if errors:
        raise UserError(report(errors))
    return config


def base_of(root: Any, tree: Tree) -> Base | None:
    """What a root takes from a folder that the tree names; None for a tree that names none, and for other roots."""
    return root.base(tree) if hasattr(root, "base") else None


def with_base(tree: Tree, base: Base | None) -> tuple[Tree, Base | None]:
    """The tree with the values of a base where it gives none, and these values alone.

    The values for a part are taken where the tree names no part or the same.
    """
    if base is None:
        return tree, None
    filled, taken = dict(tree), {}
    for key, values in base.sections.items():
        own = as_mapping(key, tree.get(key))
        if own.get("_name") in (None, values["_name"]):
            filled[key] = values | own
            taken[key] = {name: value for name, value in values.items() if name not in own}
    return filled, Base(base.source, taken)


def with_default_parts(root: type, tree: Tree, *, strict: bool = False) -> Tree:
    """The tree with the default parts named where none is chosen: the recipe's, the model's task, the task's criterion.

    Args:
        root: root dataclass; `Slot.default_from` says which slots have a default part.
        tree: section key -> values.
        strict: raise where the part is not known whose default one is asked for; else nothing is named.

    Raises:
        UserError: see `strict`.
    """
    chosen = dict(tree)
    slots = slots_of(root)
    recipe = _recipe(root, tree)
    for key, slot in slots.items():
        source = slot.default_from
        if not isinstance(tree.get(key), (dict, type(None))):
            continue
        values = as_mapping(key, tree.get(key))
        if values.get("_name") is None and "_name" in recipe.get(key, {}):
            chosen[key] = values | {"_name": recipe[key]["_name"]}
        elif values.get("_name") is None and source is not None:
            try:
                entry, _ = chosen_entry(source, slots[source], as_mapping(source, chosen.get(source)))
            except UserError:
                if strict:
                    raise
                continue  # the slot `source` will report it
            if (default := getattr(entry, key)) is not None:
                if default not in slot.registry and default not in slot.registry.former_names:
                    raise UserError(
                        f"{source} {entry.name!r}, {named(entry.target)}: {key} {default!r} is not registered"
                    )
                chosen[key] = values | {"_name": default}
    return chosen


def _recipe(root: type, tree: Tree) -> Recipe:
    """The recipe of the architecture that a tree names; empty without one, and for roots that take none."""
    entry = _architecture(root, tree)
    return {} if entry is None else entry.recipe


def _architecture(root: type, tree: Tree) -> Entry | None:
    """The architecture that a tree names; None without one, and for roots that take no recipe."""
    if hasattr(root, "INSTEAD_OF_RECIPE"):
        for key, slot in slots_of(root).items():
            values = tree.get(key)
            arch = values.get("arch") if isinstance(values, dict) else None
            if slot.architectures is not None and isinstance(arch, str) and arch in slot.architectures:
                return slot.architectures.get(arch)
    return None


def with_recipe(root: Any, tree: Tree) -> tuple[Tree, Tree]:
    """The tree with the values of its architecture's recipe where it gives none, and these values alone.

    The values for a part are taken where the chosen part is the one that the recipe is for.
    """
    given = {f"{key}.{name}" for key, values in tree.items() if isinstance(values, dict) for name in values}
    instead: dict[str, tuple[str, ...]] = getattr(root, "INSTEAD_OF_RECIPE", {})
    left = {place for option, places in instead.items() if option in given for place in places}
    filled, taken = dict(tree), {}
    slots = slots_of(root)
    for key, recipe in _recipe(root, tree).items():
        if key in left or not isinstance(tree.get(key), (dict, type(None))):
            continue
        own = as_mapping(key, tree.get(key))
        default = slots[key].default if key in slots else None
        if own.get("_name", default) != recipe.get("_name", default):
            continue
        values = {
            name: value
            for name, value in recipe.items()
            if name not in own and name != "_name" and f"{key}.{name}" not in left
        }
        if values:
            taken[key], filled[key] = values, own | values
    return filled, taken


def chosen_entry(key: str, slot: Slot, values: Tree) -> tuple[Entry, str | None]:
    """The entry that a slot's values name, and the architecture (models only).

    Raises:
        UserError: the name is unknown, or there is none and the slot has no default.
    """
    if slot.architectures is None:
        name = values.get("_name")
        name = slot.default if name is None else name
        if name is None:
            raise UserError(f"{slot.flag} is missing; there are: {', '.join(slot.registry.names())}")
        return slot.registry.get(str(name)), None
    arch, name = values.get("arch"), values.get("_name")
    if arch is None and name is None:
        arch = slot.default
    if arch is None and name is None:
        raise UserError(
            f"{slot.flag} is missing; there are {len(slot.architectures.names())}, of the families "
            f"{', '.join(slot.registry.names())}; --help {slot.flag.removeprefix('--')} shows all"
        )
    if arch is None:
        return slot.registry.get(str(name)), None
    architecture = slot.architectures.get(str(arch))
    model = architecture.model
    assert model is not None, f"architecture {arch} was registered without a model"
    if model not in slot.registry:
        raise UserError(f"architecture {arch!r}, {named(architecture.target)}: model {model!r} is not registered")
    if name is not None and name != model:
        raise UserError(f"{key}: architecture {arch!r} belongs to model {model!r}, not to {name!r}")
    return slot.registry.get(model), str(arch)


def preset(slot: Slot, arch: str | None) -> Tree:
    """The values that an architecture fills in."""
    if arch is None or slot.architectures is None:
        return {}
    entry = slot.architectures.get(arch)
    try:
        options = entry.target()
    except ValueError as error:
        raise UserError(f"architecture {arch!r}, {named(entry.target)}: {error}") from error
    kind = slot.registry.get(str(entry.model)).config
    if kind is not None and not isinstance(options, kind):
        raise UserError(
            f"architecture {arch!r}, {named(entry.target)}: it must return the model's {kind.__name__}, got {options!r}"
        )
    return dataclasses.asdict(options)


def _build_slot(
    key: str, slot: Slot, values: Tree, errors: list[str], in_file: Collection[str] | None
) -> Chosen | None:
    try:
        entry, arch = chosen_entry(key, slot, values)
    except UserError as error:
        errors.append(str(error))
        return None
    given = {name: value for name, value in values.items() if name not in ("_name", "arch")}
    if entry.config is None:
        errors.extend(_unknown("option", f"{key}.{name}", []) for name in given)
        return Chosen(entry, None, arch)
    config = _build_section(key, entry.config, preset(slot, arch) | given, errors, in_file)
    return Chosen(entry, config, arch) if config is not None else None


def _build_section(
    key: str, config_type: type, values: Tree, errors: list[str], in_file: Collection[str] | None = None
) -> Any:
    options = {option.name: option for option in options_of(key, config_type)}
    retired = getattr(config_type, "RETIRED", {})  # in older files: option -> the value that may be left out; ...: any
    values = {current_name(name): value for name, value in values.items()}
    values = {name: value for name, value in values.items() if name not in retired or retired[name] not in (..., value)}
    values = {
        name: value
        for name, value in values.items()
        if name not in options
        or value != options[name].former_default
        or (in_file is not None and f"{key}.{name}" not in in_file)
    }
    known = [f"{key}.{name}" for name in options]
    found = [
        f"option {key}.{name} was removed; only {shown(retired[name])}, its former default, is accepted"
        if name in retired
        else _unknown("option", f"{key}.{name}", known)
        for name in values
        if name not in options
    ]
    converted: Tree = {}
    for name, option in options.items():
        if name in values:
            try:
                converted[name] = option.convert(values[name])
            except ValueError as error:
                by_key = in_file is None or option.key in in_file
                found.append(str(error) if by_key else str(error).replace(option.key, option.flag, 1))
        elif option.default is MISSING:
            what = f": {option.help}" if option.help else ""
            found.append(f"{option.key if in_file is None else option.flag} is missing{what}")
    try:
        config = None if found else config_type(**converted)
    except ValueError as error:  # from `__post_init__` of a plugin's options
        errors.append(f"{named(config_type)}: {error}")
        return None
    told = wrong_values(config_type, converted) if config is None else mistakes(config)
    errors.extend([*found, *(_with_place(key, options, message, in_file) for message in told)])
    return config


def _with_place(key: str, options: dict[str, Option], message: str, in_file: Collection[str] | None) -> str:
    """A message of `mistakes` that names the value by the place where it was given: the key in a file, or the flag.

    That is the first option which the message names. Where that is a flag, others are flags too, unless the name is
    also an English word.
    """
    first = next((options[word] for word in re.findall(r"\w+", message) if word in options), None)
    if first is None:
        return f"{key}: {message}"
    by_key = in_file is None or first.derived or first.key in in_file
    text = re.sub(rf"`{first.name}`|\b{first.name}\b", first.key if by_key else first.flag, message, count=1)
    if by_key:
        return text
    others = "|".join(name for name, option in options.items() if "_" in name and not option.derived)
    return re.sub(rf"(?<![\w`-])({others})(?![\w`])", lambda name: options[name[1]].flag, text) if others else text


def _mapping(key: str, tree: Tree, errors: list[str]) -> Tree:
    try:
        return as_mapping(key, tree.get(key))
    except UserError as error:
        errors.append(str(error))
        return {}


def as_mapping(key: str, values: Any) -> Tree:
    """A section's options; `criterion: cross_entropy` is short for `criterion: {_name: cross_entropy}`.

    Raises:
        UserError: it is neither a name nor a mapping.
    """
    if isinstance(values, str):
        return {"_name": values}
    if not isinstance(values, (dict, type(None))):
        raise UserError(f"{key} is {shown(values)}; it must be a mapping of options")
    return dict(values or {})


def _unknown(what: str, name: Any, known: list[str]) -> str:
    name = name if isinstance(name, str) else shown(name)  # YAML has keys that are numbers, dates, nothing ...
    section, dot, own = name.rpartition(".")
    close = nearest(own, [each.removeprefix(section + dot) for each in known])
    return f"unknown {what} {name}" + (f"; did you mean {section}{dot}{close}?" if close is not None else "")


def report(errors: list[str]) -> str:
    """One message of several."""
    if len(errors) == 1:
        return errors[0]
    return f"{len(errors)} errors in the configuration:\n" + "\n".join(f"  {error}" for error in errors)
