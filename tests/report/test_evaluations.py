"""The page that compares what models were found to do: what it shows, and that files cannot act in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftk.errors import UserError
from ftk.report.evaluations import best_of, evaluations_html, read_evaluated
from tests.report.test_report import EVIL, Page


def write(folder: Path, accuracy: float, perplexity: float | None, **facts: Any) -> Path:
    folder.mkdir()
    result = {
        "evaluation": "lambada",
        "line": "lambada rule=harness",
        "data": "/data/lambada_test.jsonl",
        "settings": {},
        "n": 5153,
        "truncated": 0,
        "metrics": {
            "accuracy": {"value": accuracy, "standard_error": 0.69, "unit": "%"},
            "perplexity": {"value": perplexity, "standard_error": None, "unit": ""},
        },
    }
    content = {"path": "run", "data_sha256": {"lambada_test.jsonl": "a" * 64}, **facts, "results": [result]}
    (folder / "results.json").write_text(json.dumps(content))
    return folder


def test_a_line_for_each_metric_with_the_best_of_all_models(tmp_path: Path) -> None:
    values = {"one": (45.2, 12.5), "two": (43.0, 11.25), "three": (1.0, None)}
    folders = [write(tmp_path / name, *both) for name, both in values.items()]
    text = evaluations_html([read_evaluated(folder) for folder in folders], "ftk-report ...")
    page = Page(text)
    assert page.open == []
    assert "<b>45.20 % ± 0.69</b>" in text
    assert "<b>11.2500</b>" in text
    assert "43.00 % ± 0.69" in text
    assert text.count("<b>") == 2
    assert "lambada_test.jsonl, 5,153 rows" in page.text
    assert page.all("script") == []
    assert not page.all("p", **{"class": "warning"})


def test_a_difference_of_pairs_stands_in_a_line_of_its_own(tmp_path: Path) -> None:
    folders = [write(tmp_path / "one", 45.2, 12.5), write(tmp_path / "two", 43.0, 11.25, compared_with="of/one")]
    content = json.loads((folders[1] / "results.json").read_text())
    content["results"][0]["more"] = {"accuracy": {"value": -2.2, "standard_error": 0.31, "unit": "%"}}
    (folders[1] / "results.json").write_text(json.dumps(content))
    text = evaluations_html([read_evaluated(folder) for folder in folders], "")
    assert "<td>accuracy, more than one</td><td>–</td><td>-2.20 % ± 0.31</td>" in text


def test_other_data_and_a_selected_checkpoint_are_warned_of(tmp_path: Path) -> None:
    chosen = [{"folder": "x", "selected_on": "loss on valid"}]
    folders = [
        write(tmp_path / "one", 45.2, 12.5, limit=None),
        write(tmp_path / "two", 43.0, 11.25, limit=5, models=chosen, data_sha256={"lambada_test.jsonl": "b" * 64}),
    ]
    text = evaluations_html([read_evaluated(folder) for folder in folders], "")
    assert text.count('class="warning"') == 3
    elsewhere = {"/data/lambada_test.jsonl": "b" * 64}  # another file of the same name is in the same line of the table
    folders += [write(tmp_path / "three", 1.0, 2.0, data_sha256=elsewhere)]
    assert "other data: lambada_test.jsonl differs" in evaluations_html([*map(read_evaluated, folders[::2])], "")
    both = {"lambada_test.jsonl": "a" * 64, **elsewhere}  # what is of another evaluation of the same model
    folders += [write(tmp_path / "four", 1.0, 2.0, data_sha256=both)]
    assert "other data" not in evaluations_html([*map(read_evaluated, folders[::3])], "")
    content = json.loads((folders[1] / "results.json").read_text())
    content["results"][0] |= {"n": 5, "settings": {"num_fewshot": 2}}
    (folders[1] / "results.json").write_text(json.dumps(content))
    page = evaluations_html([read_evaluated(folder) for folder in folders], "")
    assert "lambada_test.jsonl, 5,153 rows / 5 rows" in page
    assert "lambada rule=harness, lambada_test.jsonl: num_fewshot" in page
    assert "two: the best checkpoint of its run by loss on valid" in text


def test_what_comes_from_files_cannot_act(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", 1.0, 2.0, **{EVIL: EVIL, "path": EVIL})
    content = json.loads((folder / "results.json").read_text())
    content["results"][0] |= {"line": EVIL, "data": EVIL}
    content["results"][0]["metrics"][EVIL] = {"value": 1, "standard_error": 0.1, "unit": EVIL}
    (folder / "results.json").write_text(json.dumps(content))
    text = evaluations_html([read_evaluated(folder)], EVIL)
    page = Page(text)
    assert (page.open, page.scripts, page.all("img")) == ([], [], [])
    assert EVIL in page.text


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"results": [1]}', b'{"results": [{"line": "a", "data": "b", "n": 1, "metrics": {"x": 1}}]}'],
)
def test_a_file_that_holds_no_results_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(UserError, match=r"results.json:? (is not JSON|: is not JSON|holds no results)|results.json: "):
        read_evaluated(tmp_path)


def test_the_best_is_the_most_of_shares_and_the_least_of_others() -> None:
    nan = float("nan")
    assert best_of([1.0, 3.0, nan], "%") == 3.0
    assert best_of([1.0, 3.0, nan], "") == 1.0
    assert best_of([3.0, 3.0], "%") is None
    assert best_of([3.0, nan], "") is None
