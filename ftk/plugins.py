"""Plugins: code outside ftk that registers parts. `user_dir` PATH, or the entry-point group `ftk.plugins`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ftk.errors import UserError, is_out_of_memory, shown
from ftk.files import expand_home

_LIBRARIES = {"site-packages", "dist-packages"}  # also those of another environment that this one looks into
ENTRY_POINT_GROUP = "ftk.plugins"


def import_user_dir(path: str | Path) -> None:
    """Imports a user's package, folder of modules, or single module, so that its decorators run; or several, A:B.

    A folder with `__init__.py` is imported as a package under the folder's name; in a folder without one,
    each `.py` file is imported; they can import each other. Doing it twice, or in another process, does no harm.

    Raises:
        UserError: nothing there, a name that clashes with another module, or an import that fails (the
            message says where and why).
    """
    for one in user_dirs(path):
        _import_place(one)


def user_dirs(path: str | Path) -> list[str]:
    """The plugins that `user_dir` names."""
    given = str(path)
    is_single = os.pathsep not in given or os.path.exists(os.path.expanduser(given))
    return [given] if is_single else [one for one in given.split(os.pathsep) if one]


def _import_place(path: str) -> None:
    try:
        place = Path(expand_home(path)).resolve()
    except ValueError as error:
        raise UserError(f"`user_dir` {path}: {error}") from error
    if place.is_file() and place.suffix == ".py":
        files = [place]
    elif (place / "__init__.py").is_file():
        files = [place / "__init__.py"]
    elif place.is_dir():
        files = sorted(file for file in place.glob("*.py"))
        if str(place) not in sys.path:
            sys.path.append(str(place))
    else:
        raise UserError(f"`user_dir` {path}: no such folder or Python file")
    if not files:
        raise UserError(f"`user_dir` {path}: there is no Python file in this folder")
    for file in files:
        _import_file(file)


def import_entry_points() -> None:
    """Imports what installed packages offer under the entry-point group `ftk.plugins`.

    Raises:
        UserError: one of them fails to import; the message names the package, and the place of the error.
    """
    for point in _entry_points():
        package = point.dist.name if point.dist is not None else point.value
        with naming_mistakes(f"the plugin {point.name!r} of the package {package} failed to import"):
            point.load()


def _entry_points() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


def import_plugins(user_dir: str | Path | None = None) -> None:
    """Imports what installed packages offer, then the user's own plugin if there is one."""
    import_entry_points()
    if user_dir is not None:
        import_user_dir(user_dir)


def refuse_recorded(file: str | Path, tree: Mapping[Any, Any], how: str = "`user_dir` ") -> None:
    """Refuse a configuration that names a plugin when none was given: what a file says is never imported by itself.

    Args:
        tree: what the file holds.
        how: what gives a plugin, to be followed by its path.

    Raises:
        UserError: it says how to import the plugin, and how to go without.
    """
    common = tree.get("common")
    recorded = common.get("user_dir") if isinstance(common, Mapping) else None
    if recorded is not None:
        raise UserError(
            f"{file} names the plugin {shown(recorded)}, which is not imported by itself: it may run any code; "
            f"give {how}PATH to import it, or {how}none to go without"
        )


@contextlib.contextmanager
def naming_plugin(recorded: object, names: Collection[str] | None = None) -> Iterator[None]:
    """While parts of a checkpoint are built: an error also says which plugin the checkpoint was made with.

    A checkpoint's own record is never imported by itself: whoever opens a checkpoint from elsewhere would run code
    of its choosing.

    Args:
        names: of which one must be what the error calls unknown; None: any error is of the plugin.
    """
    try:
        yield
    except UserError as error:
        unknown = re.findall(r"unknown [\w ]+ (?:'|--)([\w-]+)", str(error))
        if recorded is None or (names is not None and not any(name.replace("-", "_") in names for name in unknown)):
            raise
        if all(map(_is_imported, user_dirs(str(recorded)))):
            hint = "which was imported: it has changed since"
        else:
            hint = "give it with `user_dir` (in Python: user_dir=...)"
        raise UserError(f"{error}\nthe checkpoint was made with the plugin {shown(recorded)}; {hint}") from error


@contextlib.contextmanager
def naming_mistakes(what: str) -> Iterator[None]:
    """While a plugin's code runs for the first time: what it raises becomes a UserError with its place in the plugin.

    Errors of the system, a lack of memory among them, stay as they are.

    Args:
        what: failed, for the message.
    """
    try:
        yield
    except SystemExit as error:
        raise UserError(f"{what}: it ends the program, by sys.exit({error.code}){place_in_plugin(error)}") from error
    except (UserError, OSError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        text = " ".join(str(error).split())
        raise UserError(f"{what}: {type(error).__name__}: {text[:300]}{place_in_plugin(error)}") from error


def refuse(who: str, what: str, value: Any, form: str) -> NoReturn:
    """Raises UserError: a value that a part (`named`) gave, `what`, is not of the form that it must have."""
    if hasattr(value, "dtype"):
        found = f"{str(value.dtype).removeprefix('torch.')} {[*value.shape]}"
    else:
        found = "None" if value is None else f"of type {type(value).__name__}"
    raise UserError(f"{who}: {what} is {found}; it must be {form}")


def place_in_plugin(error: BaseException) -> str:
    """Where the code of a plugin raised an error or its cause, or called what did; "" where none of it did."""
    if isinstance(error, SyntaxError):
        return ""  # its text has the place
    ours = str(Path(__file__).parent)
    folders = [ours, f"{ours}_cli", *map(sysconfig.get_path, ("stdlib", "purelib", "platlib", "scripts"))]
    outside = ("<", *(os.path.join(folder, "") for folder in folders))
    installed = {point.value.partition(":")[0].partition(".")[0] for point in _entry_points()}

    def is_of_plugin(file: str) -> bool:
        parts = Path(file).parts
        own = [Path(name).stem for library, name in itertools.pairwise(parts) if library in _LIBRARIES]
        return own[-1] in installed if own else not file.startswith(outside)

    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    frames = [
        frame for one in chain for frame in traceback.extract_tb(one.__traceback__) if is_of_plugin(frame.filename)
    ]
    return f" (at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""


def _import_file(file: Path) -> None:
    is_package = file.name == "__init__.py"
    name = file.parent.name if is_package else file.stem
    loaded = sys.modules.get(name)
    if loaded is not None:
        if _source(loaded) == file:
            return
        raise UserError(
            f"`user_dir`: the module name {name!r} of {file} is taken by {_source(loaded) or 'Python'}; "
            f"rename the folder or file"
        )
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)] if is_package else None
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with naming_mistakes(f"the plugin {file} failed to import"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _is_imported(place: str) -> bool:
    """Whether a module that was imported is this file, or lies in this folder."""
    files = [file for module in list(sys.modules.values()) if (file := _source(module)) is not None]
    return any(Path(place) in (file, *file.parents) for file in files)


def _source(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None
