"""--user-dir: packages, folders, single files, and what goes wrong with them."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

import pytest

from ftk import plugins
from ftk.config.flags import read_early
from ftk.errors import UserError
from ftk.plugins import import_user_dir, naming_mistakes, naming_plugin, place_in_plugin, user_dirs
from ftk.registry import SCORERS

CHANGED = "which was imported: it has changed since"
SCORER = "from ftk.registry import register_scorer\n@register_scorer({name!r})\nclass Scorer: ...\n"


@dataclass
class Root:
    """Of a command without options."""


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Each test starts with the modules and scorers that there were before."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(SCORERS, "_entries", dict(SCORERS._entries))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_package_is_imported_with_its_submodules(tmp_path):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("from my_package import parts\n")
    (package / "parts.py").write_text(SCORER.format(name="from_package"))
    import_user_dir(package)
    import_user_dir(package)  # e.g. in a worker process that was forked
    assert "from_package" in SCORERS


def test_a_folder_without_init_and_a_single_file_work(tmp_path):
    (tmp_path / "first_part.py").write_text("import second_part\n" + SCORER.format(name="first"))
    (tmp_path / "second_part.py").write_text(SCORER.format(name="second"))
    import_user_dir(tmp_path)
    assert {"first", "second"} <= set(SCORERS.names())
    import_user_dir(tmp_path / "first_part.py")


def test_several_are_joined_by_colons_and_not_given_twice(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}_of_several.py").write_text(SCORER.format(name=name))
    one, two = (str(tmp_path / f"{name}_of_several.py") for name in ("one", "two"))
    import_user_dir(f"{one}:{two}")
    assert {"one", "two"} <= set(SCORERS.names())
    assert user_dirs(f"{one}:") == user_dirs(one) == [one]  # an empty part is not the working directory
    (tmp_path / "a:b.py").write_text("")
    assert user_dirs(tmp_path / "a:b.py") == [str(tmp_path / "a:b.py")]
    with pytest.raises(UserError, match=f"--user-dir is given twice; several plugins are --user-dir {one}:{two}"):
        read_early(Root, ["--user-dir", one, "--user-dir", two], [])


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "relative_part.py").write_text(SCORER.format(name="relative"))
    monkeypatch.chdir(tmp_path)
    import_user_dir("relative_part.py")
    assert "relative" in SCORERS


def test_a_failing_plugin_is_named_with_the_line_that_fails_and_is_not_left_behind(tmp_path):
    (tmp_path / "failing_part.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(
        UserError, match=r"^the plugin .*failing_part\.py failed to import: ZeroDiv.*\(at .*\.py:2: y = x / 0\)$"
    ):
        import_user_dir(tmp_path)
    assert "failing_part" not in sys.modules


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("no memory of this token"), UserError),
        (RuntimeError("the allocation of heads is wrong"), UserError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), RuntimeError),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), RuntimeError),
        (MemoryError(), MemoryError),
    ],
)
def test_of_the_errors_of_a_plugin_a_lack_of_memory_alone_stays_as_it_is(error, raised):
    with pytest.raises(raised), naming_mistakes("the plugin failed"):
        raise error


@pytest.mark.parametrize(("name", "message"), [("nothing_here", "no such folder"), ("empty", "no Python file")])
def test_a_path_without_python_is_refused(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        import_user_dir(tmp_path / name)


def test_a_name_that_another_module_has_is_refused(tmp_path):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text("")
    with pytest.raises(UserError, match="the module name 'json'"):
        import_user_dir(tmp_path / "json")


def test_what_a_checkpoint_needs_of_a_plugin_is_said_by_whether_it_was_imported(tmp_path):
    recorded = tmp_path / "its_plugin"
    recorded.mkdir()
    (recorded / "__init__.py").write_text("")

    def said() -> str:
        with pytest.raises(UserError) as raised, naming_plugin(str(recorded)):
            raise UserError("unknown scorer 'mine'")
        return str(raised.value)

    assert said().endswith(f"with the plugin {str(recorded)!r}; give it with `user_dir` (in Python: user_dir=...)")
    import_user_dir(recorded)
    with pytest.raises(UserError, match="give it with"), naming_plugin(f"{recorded}:{tmp_path / 'another.py'}"):
        raise UserError("unknown scorer 'another'")
    assert said() == f"unknown scorer 'mine'\nthe checkpoint was made with the plugin {str(recorded)!r}; {CHANGED}"


def test_an_error_that_is_its_own_cause_is_placed():
    error = ValueError("odd")
    try:
        raise error from error
    except ValueError:
        assert f"{__file__}:" in place_in_plugin(error)


@pytest.mark.parametrize(("name", "is_placed"), [("installed_plugin", True), ("some_library", False)])
def test_of_installed_packages_an_error_is_placed_in_plugins_alone(tmp_path, monkeypatch, name, is_placed):
    folder = tmp_path / "lib" / "site-packages"
    (folder / "installed_plugin-1.0.dist-info").mkdir(parents=True)
    (folder / "installed_plugin-1.0.dist-info" / "entry_points.txt").write_text(
        "[ftk.plugins]\nx = installed_plugin:x\n"
    )
    (folder / f"{name}.py").write_text("\n1 / 0\n")
    monkeypatch.setattr(plugins, "_entry_points", plugins._entry_points.__wrapped__)  # it looks again
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ZeroDivisionError) as raised:
        importlib.import_module(name)
    assert (f"{name}.py:2: 1 / 0)" in place_in_plugin(raised.value)) == is_placed
