"""The same configuration tree for Hydra: ConfigStore groups made from the dataclasses, and recipe files.

Groups are the slots (`task=NAME`, `model=ARCH`, `optimizer=adamw`); `base` holds the plain sections.
A recipe (configs/*.yaml) lists what it is made of and then what differs:

    defaults: [base, {task: NAME}, {model: ARCH}, {optimizer: adamw}, _self_]
    training: {max_update: 200000}
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from ftk.config.build import preset
from ftk.config.options import MISSING, options_of
from ftk.config.root import Tree, sections_of, slots_of
from ftk.errors import UserError


def recipe_folder() -> Path:
    """Where the recipes are: `configs/` of a checkout, `ftk/recipes/` of an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / "recipes" if (package / "recipes").is_dir() else package.parent / "configs"


def recipes() -> dict[str, Path]:
    """The recipes that come with ftk: name ("quickstart", "continue/bert") -> file."""
    folder = recipe_folder()
    files = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("*/*.yaml"))]
    files = [file for file in files if file.parent.name != "harness"]  # tasks of lm-evaluation-harness
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def register_groups(root: type) -> None:
    """Puts every section and every registered part (plugins included) into Hydra's ConfigStore."""
    parts, archs = [], []
    for key, slot in slots_of(root).items():
        for name in (*slot.registry.names(), *slot.registry.former_names):
            entry = slot.registry.get(name)
            parts.append((key, name, entry.name, entry.config))
        archs += [(key, arch) for arch in (slot.architectures.names() if slot.architectures is not None else ())]
    _store(root, tuple(parts), tuple(archs))


@functools.lru_cache(maxsize=1)  # the store has one root at a time
def _store(
    root: type, parts: tuple[tuple[str, str, str, type | None], ...], archs: tuple[tuple[str, str], ...]
) -> None:
    """The same, once for the same parts: what Hydra makes of all of them takes a good part of a second.

    Args:
        parts: group, name, present name and options of each.
        archs: group and name of each architecture.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.repo = _Shared(store.repo)
    base = {key: _defaults(key, config) for key, (kept, config) in sections_of(root).items() if kept.saved}
    store.store(name="base", node=base)
    for key, name, present, config in parts:
        store.store(group=key, name=name, node={"_name": present} | _defaults(key, config))
    for key, arch in archs:
        slot = slots_of(root)[key]
        assert slot.architectures is not None
        model = slot.architectures.get(arch).model
        store.store(group=key, name=arch, node={"_name": model, "arch": arch} | preset(slot, arch))


class _Shared(dict[str, Any]):
    """What Hydra's store holds; each composition copies it whole, which would take most of its time, and only reads."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


def compose_file(root: type, file: Path, overrides: list[str] | None = None) -> Tree:
    """The tree of a recipe file with a `defaults` list, composed by Hydra.

    Raises:
        UserError: Hydra's own message, in one line, when the file does not compose.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    register_groups(root)
    _search_recipes()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(file.resolve().parent), version_base="1.3", job_name=file.stem):
            return to_tree(compose(file.stem, overrides=overrides or []))
    except composition_errors() as error:
        raise UserError(f"{file} does not compose: {explained(error)}") from error


@functools.cache  # once is enough for all files
def _search_recipes() -> None:
    """Lets a file's list of defaults name a recipe that comes with ftk, as ftk-hydra-train does."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Recipes(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append("ftk", str(recipe_folder()))

    Plugins.instance().register(Recipes)


def composition_errors(*, with_pythons: bool = True) -> tuple[type[Exception], ...]:
    """What Hydra raises of a recipe that cannot be composed.

    Args:
        with_pythons: also Python's and YAML's own errors, which come of odd `defaults` and of keys given twice.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    pythons = (YAMLError, ValueError, AssertionError, RecursionError) if with_pythons else ()
    return (HydraException, OmegaConfBaseException, *pythons)


def explained(error: Exception) -> str:
    """Hydra's message in one line."""
    if isinstance(error, RecursionError):
        return "its list of defaults leads back to itself"
    if isinstance(error, AssertionError):
        return "its list of defaults must hold names, or pairs of a group and a name"
    return " ".join(str(error).split())


def to_tree(config: Any) -> Tree:
    """A composed DictConfig as plain values, interpolations resolved."""
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(config, resolve=True)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _defaults(section: str, config: type | None) -> dict[str, Any]:
    """Field -> default; what must be given is left out, so that a missing value is reported by its flag."""
    if config is None or not dataclasses.is_dataclass(config):
        return {}
    # None instead of absence: Hydra's struct mode admits only keys that exist.
    return {o.name: None if o.default is MISSING else o.default for o in options_of(section, config)}
