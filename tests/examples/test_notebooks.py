"""The notebooks: saved without outputs; their cells run in order (as Jupyter would, which is not needed here)."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path, kind: str = "code") -> list[dict]:
    return [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_saved_without_outputs_and_in_both_languages(notebook):
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(notebook))
    explained = "".join("".join(cell["source"]) for cell in cells(notebook, "markdown"))
    assert re.search("[a-z]{4}", explained)
    assert re.search("[\u4e00-\u9fff]{4}", explained)


def fills_the_blank_in_colour(names: dict, shown: str) -> None:
    assert names["result"].text == "Beautiful is better than ugly."
    assert "background: hsla(1" in shown


def beats_the_unigram_loss(names: dict, shown: str) -> None:
    summary = names["summary"]
    assert summary.num_updates == 200
    assert summary.loss < summary.unigram_loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "claim"),
    [("fill_blanks", fills_the_blank_in_colour), ("train_small_glm", beats_the_unigram_loss)],
    ids=["fill_blanks", "train_small_glm"],
)
def test_its_cells_run_in_order(name, claim, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names: dict = {"__name__": "__main__"}
    shown = "".join(run("".join(cell["source"]), names) for cell in cells(ROOT / f"examples/notebooks/{name}.ipynb"))
    claim(names, shown)


def run(code: str, names: dict) -> str:
    """A cell: a command behind "!", or Python, whose last expression is shown as a notebook shows it."""
    if code.startswith("!"):
        subprocess.run(["bash", "-c", code[1:]], check=True)
        return ""
    body = ast.parse(code).body
    names["_"] = None
    if isinstance(body[-1], ast.Expr):
        body[-1] = ast.Assign([ast.Name("_", ast.Store())], body[-1].value)
    exec(compile(ast.fix_missing_locations(ast.Module(body, [])), "cell", "exec"), names)
    value = names["_"]
    return value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)


def test_there_is_a_claim_for_each_notebook():
    assert [path.stem for path in NOTEBOOKS] == ["fill_blanks", "train_small_glm"]
