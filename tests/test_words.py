"""Messages and help texts of the library name options by their field, which commands show as flags."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ftk.errors import with_flags
from tests.config.all_options import ROOTS, flags_of

ROOT = Path(__file__).resolve().parents[1]
FLAG = re.compile(r"--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
ABOUT_FLAGS = ("ftk/config/", "ftk/errors.py", "ftk/planner/", "ftk/report/environment.py")
"""What makes flags of fields, prints command lines to copy, or calls other programs."""

OTHERS = ("--help", "--version", "--traceback", "--nproc-per-node", "--no-python", "--lm-path")
"""Flags of every command, of torchrun and of fairseq."""

OTHER_FIELDS = ("--blank-order", "--nbest-over", "--dataset-impl")
"""Flags of a task's own generator, and of fairseq."""


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Errors, log lines, help texts and what `validate` yields, with their lines."""
    for node in ast.walk(tree):
        shown: ast.AST | None = None
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            shown = node if name in ("UserError", "warning", "info", "field", "option") else None
        elif isinstance(node, ast.Yield):
            shown = node.value
        parts = list(ast.walk(shown)) if shown is not None else []
        whole = [part for part in parts if isinstance(part, ast.JoinedStr)]
        pieces = {id(piece) for part in whole for piece in part.values}
        for part in parts:
            if isinstance(part, (ast.JoinedStr, ast.Constant)) and id(part) not in pieces:
                yield part.lineno, text_of(part)


def text_of(node: ast.AST) -> str:
    """A string without what a format puts into it."""
    constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return "".join(value for value in constants if isinstance(value, str))


def test_messages_of_the_library_spell_no_flags():
    spelled = []
    for path in sorted((ROOT / "ftk").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(ABOUT_FLAGS):
            continue
        for line, text in messages(ast.parse(path.read_text(encoding="utf-8"))):
            found = [flag for flag in FLAG.findall(text) if flag not in OTHERS]
            # A flag's own definition, and a command line to type.
            if found and not FLAG.fullmatch(text) and not re.search(r"\bftk-[a-z]+|torchrun ", text):
                spelled.append(f"{name}:{line}: {', '.join(found)}")
    assert not spelled, "write the field in backticks, commands show it as their flag"


def test_words_in_backticks_are_options():
    known = {flag for root in ROOTS.values() for flag in flags_of(root)} | set(OTHER_FIELDS)
    known |= {flag for path in (ROOT / "ftk_cli").glob("*.py") for flag in FLAG.findall(path.read_text("utf-8"))}
    for path in sorted((ROOT / "ftk").rglob("*.py")):
        for line, text in messages(ast.parse(path.read_text(encoding="utf-8"))):
            unknown = {with_flags(word) for word in re.findall(r"`[a-z][a-z0-9_]*`", text)} - known
            assert not unknown, f"{path}:{line}: a command would print {unknown}; write other names in single quotes"


def test_a_command_shows_fields_as_its_flags():
    assert with_flags("`max_len` is 0; give `beam` 4, or `a b`") == "--max-len is 0; give --beam 4, or `a b`"
