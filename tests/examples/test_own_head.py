"""The example of a head of one's own learns its texts by heart."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.tasks.cloze.made import make_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_head" / "mean_pooling.py"


@pytest.mark.parametrize("family", ["glm", "bert", "gpt2"])
def test_a_pretrained_body_learns_under_a_head_of_ones_own(tmp_path, monkeypatch, capsys, family: str) -> None:
    model = make_model(tmp_path / "model", family)
    texts = tmp_path / "texts.tsv"
    lines = [f"{label}\tthe {color} {thing}\n" for label, color in (("warm", "red"), ("cold", "blue")) for thing in
             ("cat", "dog", "sun", "car", "sky", "house", "grass", "rain")]  # fmt: skip
    texts.write_text("".join(lines))
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(model / "checkpoint_1"), str(texts)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == "16 of 16 right\n"
