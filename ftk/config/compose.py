"""From a command line to a typed configuration.

Defaults < architecture and its recipe < the folder that a training starts from < --config file < flags.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from ftk.config import flags
from ftk.config.build import (
    as_mapping,
    base_of,
    build,
    report,
    unknown_sections,
    with_base,
    with_default_parts,
    with_recipe,
)
from ftk.config.options import NONE
from ftk.config.parts import chosen_groups, section_groups
from ftk.config.root import Tree, load_yaml, slots_of
from ftk.errors import UserError, did_you_mean, visible
from ftk.plugins import import_entry_points, import_user_dir, refuse_recorded
from ftk.version import __version__

R = TypeVar("R")


def compose(root: type[R], prog: str, description: str, argv: Sequence[str]) -> R:
    """The configuration that a command line asks for.

    Plugins (installed ones, then `--user-dir`) are imported first, so that their names and options exist.
    `--help` prints and exits, see `ftk.config.help`.

    Raises:
        UserError: any mistake in the arguments or in the configuration file.
        SystemExit: after --help or --version.
    """
    groups = section_groups(root)
    early = flags.read_early(root, argv, [option for group in groups for option in group.options])
    if early.version:
        print(f"ftk {__version__}")
        raise SystemExit(0)
    import_entry_points()
    if early.user_dir is not None and early.user_dir.lower() not in NONE:
        import_user_dir(early.user_dir)
    tree: Tree = read_config_file(root, early.config, early.user_dir) if early.config is not None else {}
    if errors := unknown_sections(root, tree):  # before what is missing, such as an architecture
        raise UserError(report(errors))
    in_file = {f"{key}.{name}": f"{early.config}" for key, values in tree.items() for name in as_mapping(key, values)}

    for key, name in early.names.items():
        _choose(tree, key, slots_of(root)[key].architectures is not None, name)

    base = None
    if early.help is None:
        base = base_of(root, {**tree, **{key: as_mapping(key, tree.get(key)) | v for key, v in early.values.items()}})
    try:
        chosen = chosen_groups(root, with_base(tree, base)[0], complete=early.help is None)
    except UserError:
        # `--arhc NAME` may be why --arch is missing; parts are the usual ones here
        flags.refuse_misspelt(root, prog, argv, [*groups, *chosen_groups(root, {}, complete=False)])
        raise
    if early.help is not None:
        from ftk.config.help import help_text

        filled, _ = with_recipe(root, with_default_parts(root, tree))
        groups = [*section_groups(root, filled), *chosen]
        print(visible(help_text(root, prog, description, early.help, groups)), end="")
        raise SystemExit(0)
    given = flags.parse(root, prog, argv, [*groups, *chosen])
    for key, values in given.items():
        tree[key] = as_mapping(key, tree.get(key)) | values
        for name in values:
            in_file.pop(f"{key}.{name}", None)
    return build(root, tree, in_file, [f"{key}.{name}" for key, values in given.items() for name in values], base)


def read_config_file(root: type, path: str, user_dir: str | None = None) -> Tree:
    """The tree of a YAML file: a run's config.yaml, or a recipe with a Hydra `defaults` list.

    A bare name without an ending means a recipe that comes with ftk. The plugin that the file names as
    `common.user_dir` is not imported: the file may come from anybody.

    Args:
        path: the file, or a recipe's name.
        user_dir: the plugin that was given, which is imported; "none" for going without.

    Raises:
        UserError: no such file, nothing that can be read, or it names a plugin and none is given.
    """
    from ftk.config.hydra import compose_file

    file = recipe_file(path)
    tree = load_yaml(file)
    if user_dir is None:
        refuse_recorded(file, tree)
    if "defaults" in tree:
        tree = compose_file(root, file)
        if user_dir is None:  # in a file that this one is made of
            refuse_recorded(file, tree)
    return tree


def recipe_file(path: str, flag: str = "--config") -> Path:
    """The file that `flag` names: a YAML file, or the name of a recipe that comes with ftk.

    A recipe's name means the recipe also where a folder of that name lies, unless a run's config.yaml lies in it.

    Raises:
        UserError: it is neither; names the recipes.
    """
    from ftk.config.hydra import recipes

    known = recipes()
    in_folder = os.path.join(path, "config.yaml")
    is_folder = os.path.isdir(path)
    if path in known and not os.path.exists(in_folder if is_folder else path):
        return known[path]
    if is_folder:
        raise UserError(f"{flag} {path} is a folder; give the YAML file itself, e.g. {in_folder}")
    if os.path.splitext(path)[1] or os.path.exists(path):
        return Path(path)
    hint = did_you_mean(path, known).replace("there are: ", "recipes: ")
    raise UserError(f"{flag} {path}: there is no such file and no such recipe; {hint}")


def _choose(tree: Tree, key: str, is_architecture: bool, name: str) -> None:
    """Put a part chosen by flag into the tree; another part than the file's starts from its own defaults."""
    values = tree.get(key)
    name_key = "arch" if is_architecture else "_name"
    if not isinstance(values, dict) or values.get(name_key) != name:
        tree[key] = {name_key: name}
