"""A user's own cloze task in a YAML file: what it can say, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftk.data.supervised.cloze_files import load_cloze, with_content
from ftk.errors import UserError
from tests.data.asked_cloze import rows_of, spelled

WORDS = "patterns: [{text: '{gap}', words: {1: x, 2: y}}]"


def test_a_file_of_ones_own_works_as_a_built_in_task(tmp_path: Path) -> None:
    file = tmp_path / "reviews.yaml"
    file.write_text(
        "label: stars\n"
        "patterns:\n"
        "  - text: '{review:shorten} It was{gap}.'\n"
        "    words: {1: ' bad', 5: ' good'}\n"
        "  - text: '{review.title:lower}{|}{gap}{|}'\n"
        "    candidates: ['{first}', '{second}']\n"
        "labels: [1, 5]\n"
    )
    cloze = load_cloze(str(file))
    assert (cloze.pattern, cloze.scoring, cloze.end) == (0, "restricted_logits", False)
    (question,) = cloze.questions(rows_of({"review": "Fine.", "stars": 5}))
    assert (spelled(question), question.right, question.labels) == ("~Fine.· It was·[]·.", (1,), (1, 5))
    nested = {"review": {"title": "Title"}, "first": "a", "second": "b", "stars": 1}
    (question,) = cloze.questions(rows_of(nested), 1)
    assert (spelled(question), question.candidates, question.right) == ("title·[]", ("a", "b"), (0,))
    assert json.dumps(question.idx) == "0"


def test_fields_within_objects_serve_as_optional_texts_labels_and_candidates(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        "label: target.label\n"
        "labels: [0, 1]\n"
        "candidates: '{ target.choices}'\n"
        "patterns: ['{text}{meta.hint:optional}{gap}']\n"
    )
    target = {"label": 1, "choices": ["a", "b"]}
    rows = rows_of({"text": "T", "meta": {"hint": "H"}, "target": target}, {"text": "T", "meta": 3, "target": target})
    hinted, plain = load_cloze(str(file)).questions(rows, train=True)
    assert (spelled(hinted), spelled(plain)) == ("T·H·[]", "T·[]")
    assert (hinted.candidates, hinted.right) == ((" a", " b"), (1,))


def test_without_labels_the_label_is_the_number_of_the_right_candidate(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("patterns: [{text: '{q}{gap}', candidates: '{ choices}'}]")
    three, four = {"q": "Q", "choices": ["a", "b", "c"], "label": 2}, {"q": "Q", "choices": [*"abcd"], "label": 0}
    questions = load_cloze(str(file)).questions(rows_of(three, four))
    assert [(one.labels, one.right) for one in questions] == [((0, 1, 2), (2,)), ((0, 1, 2, 3), (0,))]
    with pytest.raises(UserError, match="field 'label' is 3; it must be one of 0, 1, 2"):
        load_cloze(str(file)).questions(rows_of(three | {"label": 3}))


def test_a_text_names_fields_even_one_of_its_own_name(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(f"{WORDS}\ntexts: {{said: '\"{{said}}\"'}}".replace("{gap}", "{said}{gap}"))
    assert spelled(load_cloze(str(file)).questions(rows_of({"said": "Hi."}))[0]) == '"Hi."·[]'
    file.write_text(f"{WORDS}\ntexts: {{one: '{{other}}', other: '{{one}}'}}".replace("{gap}", "{one}{gap}"))
    with pytest.raises(UserError, match=r"rows.jsonl:1: field 'other' is missing"):
        load_cloze(str(file)).questions(rows_of({"said": "Hi."}))


def test_the_content_of_a_file_is_the_same_task(tmp_path: Path, caplog) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        "like: copa\n"
        "label: right\n"
        "patterns:\n"
        "  1: {text: '“{premise}” {gap}', words: {false: ' “no”', 1: ' yes', 'null': ' 也许'}}\n"
        "  8: '{premise}: {gap}'\n"
    )
    cloze, content = load_cloze(str(file)), with_content(str(file))
    file.unlink()
    assert load_cloze(content) == cloze
    warned = [message.partition(": a space stands before {gap}")[0] for message in caplog.messages]
    assert warned == [f"{file}: pattern {number}" for number in (1, 8)]
    assert cloze.name == str(file)
    assert [*(cloze.patterns[1].words or ())] == [False, 1, "null"]
    assert with_content(content) == content
    assert with_content("copa") == "copa"
    with pytest.raises(UserError, match="`cloze` is not a YAML file"):
        load_cloze(content[:-1])
    with pytest.raises(UserError, match="`cloze`: unknown key 'a'"):
        load_cloze("{a: b}")


WRONG = [
    ("[1]", r"a cloze task must be a mapping, not \[1\]"),
    ("a: [", "is not a YAML file"),
    ("pattens: []", r"unknown key 'pattens'; did you mean 'patterns'"),
    ("patterns: []", "'patterns' must be a list of patterns"),
    ("patterns: {a: x}", "'patterns' must be a list of patterns"),
    ("patterns: ['{a}']", r"pattern 0: '\{a\}' has 0 gaps; it must have one \{gap\}"),
    ("patterns: ['{gap}{gap}']", r"has 2 gaps; it must have one \{gap\}"),
    ("patterns: ['{gap} {a']", "a brace has no partner"),
    ("patterns: ['{gap} {a b}']", r"\{a b\} is no field"),
    ("patterns: ['{gap}{a:shortn}']", "unknown modifier 'shortn'; did you mean 'shorten'"),
    ("patterns: ['{gap}{a}']", "needs either 'words'"),
    ("patterns: [{text: '{gap}', words: {1: x}}]", "must be a mapping of two or more labels to words"),
    ("patterns: [{text: '{gap}', words: {1: x, 2: 3}}]", "must be a mapping of two or more labels to words"),
    ("patterns: [{text: '{gap}', candidates: 3}]", "'candidates' must be a text with fields"),
    ("patterns: [{text: '{gap}', candidates: '{gap}'}]", r"has 1 gaps; it must have no \{gap\}"),
    ("patterns: [{text: '{gap}', wrds: {}}]", "unknown key 'wrds'; did you mean 'words'"),
    ("patterns: [{text: '{gap}', words: {1: x, 2: y}}]\nlabels: 3", "'labels' is 3; it must be a list"),
    (
        "patterns: [{text: '{gap}', candidates: [a, b]}]\nlabels: [[1], [2]]",
        r"the label \[1\] must be a text, a number",
    ),
    ("patterns: [{text: '{gap}', words: {1: x, null: y}}]", "the label None must be a text, a number, true or false"),
    ("patterns: [{text: '{gap}', words: {1: x, 2: y}}]\npattern: 4", "'pattern' is 4; there are: 0"),
    ("patterns: [{text: '{gap}', words: {1: x, 2: y}}]\nend: 4", "'end' is 4; it must be of type bool"),
    ("patterns: [{text: '{gap}', words: {1: x, 2: y}}]\nreader: cpa", "'reader' is 'cpa'; did you mean 'copa'"),
    (
        "patterns: [{text: '{gap}', words: {1: x, 2: y}}]\nmetrics: [acuracy]",
        "unknown metric 'acuracy'; did you mean 'accuracy'",
    ),
    (
        "patterns: [{text: '{gap}', words: {1: x, 2: y, 3: z}}]\nmetrics: [mcc]",
        "the metric mcc is for two labels, and pattern 0 has 3; choose another",
    ),
    (
        "patterns: [{text: '{gap}', candidates: '{a}'}]\nlabels: [1]\nmetrics: [macro_f1]",
        "the metric macro_f1 is for two labels or more, and pattern 0 has 1",
    ),
    ("like: boolqq", "'like' is 'boolqq'; did you mean 'boolq'"),
    ("like: boolq\npatterns: x", "'patterns' must be a list of patterns"),
    ("like: boolq\npatterns:", "'patterns' must be a list of patterns"),
    ("like: boolq\ntexts: x", "'texts' must be a mapping, not 'x'"),
    (f"{WORDS}\nname: 3", "'name' is 3; it must be of type str"),
    (f"{WORDS}\ntexts: {{a: '{{prompt}}'}}", r"text a: '\{prompt\}' has \{prompt\}, which only the text of a pattern"),
    (f"{WORDS}\ntexts: {{a: '{{|}}'}}", r"has \{\|\}, which only the text of a pattern"),
    ("patterns: [{text: '{gap}', words: {1: x, 2: y}, each: [a, b]}]", "it is not for 'words'"),
    ("patterns: [{text: '{gap}', candidates: '{a}', each: [a, 3]}]", r"'each' is \['a', 3\]; it must be a list"),
    ("patterns: [{text: '{gap}', candidates: [a, b], each: [a]}]", "has 2 candidates, but 'each' has 1 fields"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_is_wrong_with_a_file_is_said(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"own.yaml.*{message}"):
        load_cloze(str(file))
