"""The house's rules, checked on the source: imports only go down, and the light rooms stay light."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from ftk.builtins import BUILTIN_MODULES
from ftk_cli.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[1]

FOUNDATION = {
    "version",
    "errors",
    "files",
    "parsing",
    "terminal",
    "lazy_names",
    "name_patterns",
    "freed_memory",
    "child_process",
    "builtins",
    "registry",
    "plugins",
    "logging",
    "batch",
}
BELOW_TASKS = {
    "config",
    "tokenizers",
    "data",
    "modules",
    "models",
    "criterions",
    "optim",
    "model_parallel",
    "checkpoint",
    "generation",
    "evaluation",
}
# room -> rooms it may import (besides itself and the foundation); see docs/architecture.md
ROOMS: dict[str, set[str]] = {
    "config": set(),
    "tokenizers": {"config"},
    "data": {"config", "tokenizers"},
    "modules": set(),
    "models": {"modules", "config"},
    "model_parallel": {"config"},
    "criterions": {"modules", "model_parallel", "config"},
    "optim": {"modules", "model_parallel", "config"},
    "checkpoint": {"model_parallel", "modules", "models", "tokenizers", "config"},
    "evaluation": {"config", "data", "tokenizers", "generation"},
    "planner": {"config", "model_parallel", "models"},
    "report": {"config"},
    "generation": {"modules", "models", "tokenizers", "config", "checkpoint"},
    "tasks": BELOW_TASKS,
    "trainer": BELOW_TASKS | {"tasks", "report", "hub", "planner"},
    "serving": {"config", "modules", "generation"},
    "hub": {"config", "tokenizers", "modules", "model_parallel", "checkpoint", "generation", "models", "data", "tasks"},
}
FORBIDDEN = {
    "data": ("torch.nn", "torch.distributed"),
    "modules": ("torch.distributed",),
    "models": ("torch.distributed",),
    "tokenizers": ("torch",),
    "config": ("torch",),
}

FORBIDDEN_CALLS = ("eval", "exec", "pickle.load", "pickle.loads", "yaml.load", "os.system")


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def imports(file: Path) -> list[str]:
    """Dotted names that a file imports at any depth, type-checking-only imports left out."""
    tree = tree_of(file)
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {id(node) for block in blocks for node in ast.walk(block)}
    names = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def room_of(file: Path) -> str:
    return file.relative_to(ROOT / "ftk").with_suffix("").parts[0]


FILES = sorted((ROOT / "ftk").rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_down(file):
    room = room_of(file)
    if room in FOUNDATION:
        allowed = FOUNDATION
    elif room == "__init__":
        allowed = {"version", "hub", "lazy_names"}
    else:
        assert room in ROOMS, f"{file}: an unknown room; add it to docs/architecture.md and to this test"
        allowed = ROOMS[room] | {room} | FOUNDATION
    for name in imports(file):
        parts = name.split(".")
        if parts[0] == "ftk" and len(parts) > 1:
            assert parts[1] in allowed, f"{file.relative_to(ROOT)} imports {name}: an arrow that goes up"
        assert parts[0] != "ftk_cli", f"{file.relative_to(ROOT)} imports the commands"
        for forbidden in FORBIDDEN.get(room, ()):
            assert not f"{name}.".startswith(f"{forbidden}."), f"{file.relative_to(ROOT)} imports {name}"


def test_what_is_built_on_a_family_of_models_is_not_needed_by_it():
    """So that it can be deleted, with its lines in builtins.py; outside of ftk/models no family is imported."""
    families = {module.split(".")[2] for module in BUILTIN_MODULES["model"].values()}
    needs: dict[str, set[str]] = {family: set() for family in families}
    for file in FILES:
        room, *inner = file.relative_to(ROOT / "ftk").parts
        for name in imports(file):
            found = name.removeprefix("ftk.models.").partition(".")[0]
            if name.startswith("ftk.models.") and found in families and found != (inner or [""])[0]:
                assert room == "models", f"{file.relative_to(ROOT)} imports {name}"
                needs[inner[0]].add(found)  # what the families share imports none
    assert needs["glm130b"] == {"glm"}
    while free := [family for family, others in needs.items() if not others]:
        needs = {family: others - {*free} for family, others in needs.items() if others}
    assert not needs, f"families that need each other: {needs}"


CALLS = {  # of commands -> what they print
    **{(command, "--help"): "usage" for command in COMMANDS},
    **{(command, "--version"): "ftk 0." for command in COMMANDS},
    ("train", "--arch", "glm_tiny", "--help", "all"): "--optimizer",
    ("train", "--help", "momentum"): "--optimizer",
    ("checkpoint", "--help"): "inspect",
    ("checkpoint", "convert", "--help"): "glm, hf",
    ("checkpoint", "convert", "--help", "shard"): "--max-shard-size",
}


def test_help_and_version_import_no_torch():
    code = (
        "import sys; from ftk_cli.__main__ import main\n"
        f"for words in {[*CALLS]}:\n"
        "    try: code = main(words)\n"
        "    except SystemExit as stop: code = stop.code\n"
        "    print('CODE', code, 'TORCH', 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *printed, last = done.stdout.split("CODE 0 TORCH False\n")
    assert last == ""
    for call, text, expected in zip(CALLS, printed, CALLS.values(), strict=True):
        assert expected in text, call


def test_dir_shows_the_public_names_without_importing_torch():
    code = "import ftk, ftk.trainer, sys; print(*dir(ftk)); print(*dir(ftk.trainer)); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "__version__ load_generator load_model load_tokenizer parallelize",
        "Hook Run StepInfo TrainConfig Trainer build_run",
        "False",
    ]


def test_options_of_parts_need_no_torch():
    code = (
        "import sys, ftk.trainer.config\n"
        "from ftk.models import model_config\n"
        "from ftk.registry import CRITERIONS, MODELS\n"
        "model_config('glm_large'), MODELS.get('glm'), CRITERIONS.get('cross_entropy')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_nothing_is_unpickled_or_evaluated():
    for file in [*FILES, *(ROOT / "ftk_cli").rglob("*.py")]:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in FORBIDDEN_CALLS, f"{file}: {name}"
                if name == "torch.load":
                    assert "weights_only=True" in ast.unparse(node), f"{file}: torch.load without weights_only=True"
                assert not any(k.arg == "shell" for k in node.keywords), f"{file}: a shell string"


def test_class_variables_say_their_types():
    """Python 3.10 refuses the bare word when it evaluates the types of a class of options."""
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.AnnAssign):
                assert ast.unparse(node.annotation) != "ClassVar", f"{file}:{node.lineno}"
