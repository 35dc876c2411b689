"""Rows and tasks that nothing can be learned from: one line with file, line and field, exit code 2, nothing written."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ftk_cli import checkpoint, data, evaluate, generate, train
from tests.serving.test_chat import make_chat_model
from tests.small_run import SHAPE

COPA = {"premise": "the fox.", "choice1": "It reads.", "choice2": "It jumps.", "question": "cause", "label": 0}
WIC = {"word": "fox", "sentence1": "A fox.", "sentence2": "The fox.", "start1": 2, "end1": 5, "start2": 4, "end2": 7}
WIC |= {"label": True}
BOOLQ = {"passage": "the quick brown fox", "question": "is it quick", "label": True}
PAIR = {"source": "the quick fox", "target": "jumps"}
TURNS = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]

ANSWERLESS = {"idx": 1, "passage": {"text": "the fox", "questions": [{"question": "who", "answers": [], "idx": 0}]}}
ROBOT = {"role": "robot", "content": "the fox"}

CLOZE = ["--task", "cloze", "--candidate-scoring", "sum", "--cloze"]
SHORT = ["--target-length", "32"]
SEQ2SEQ, SFT = ["--task", "seq2seq", *SHORT], ["--task", "sft", "--template", "plain", *SHORT]
PREFER = ["--task", "preference", "--template", "plain", *SHORT]
CLASSIFY = ["--task", "classification", "--labels", "good", "bad"]
CHOOSE = ["--task", "classification", "--kind", "multiple_choice"]
COPA_BY, WIC_BY, MULTIRC_BY, BOOLQ_BY = (
    f"{name} candidate_scoring=sum" for name in ("copa", "wic", "multirc", "boolq")
)


class Case(NamedTuple):
    """Rows, how they are learned from, and what is said of them.

    Attributes:
        task: flags of ftk-train and ftk-data.
        rows: of train.jsonl; or how the names of hostile files begin.
        learned: what ftk-train and ftk-data say behind "train".
        evaluation: of ftk-evaluate; None: the rows are no mistake there, or none of its own.
        asked: what ftk-evaluate says; None: the same.
    """

    task: list[str]
    rows: list[dict[str, Any]] | str
    learned: str
    evaluation: str | None = None
    asked: str | None = None


MISSING = "field 'label' is missing; a row to learn from says which answer is right"
EMPTY = "is empty; write a text, or remove the row"
EMPTY_ANSWER = "field 'target' holds an empty answer; write a text, or remove the row"
NO_QUESTION = "field 'passage.questions' is empty"

CASES = {
    "70": Case(
        [*CLOZE, "copa"], "70_copa_bad", f".jsonl:2: {MISSING}", COPA_BY, ".jsonl:3: field 'label' is 2; it must"
    ),
    "71": Case([*CLOZE, "wic"], "71_wic_bad", ".jsonl:2: field 'start1' is 200 and 'end1' is 205", WIC_BY),
    "73": Case([*CLOZE, "multirc"], "73_multirc", f".jsonl:1: {NO_QUESTION}", MULTIRC_BY),
    "60": Case(SEQ2SEQ, "60_count", ".source has 5 lines, ", "generation"),
    "61": Case(SEQ2SEQ, "61_empty", f".target:2: field 'target' {EMPTY}", "generation", f".target:2: {EMPTY_ANSWER}"),
    "no such label": Case(
        [*CLOZE, "copa"], [COPA, COPA | {"label": 2}], ".jsonl:2: field 'label' is 2; it must be one of 0, 1", COPA_BY
    ),
    "a label in quotes": Case(
        [*CLOZE, "copa"], [COPA, COPA | {"label": "1"}], ".jsonl:2: field 'label' is '1'; it must be a whole", COPA_BY
    ),
    "no candidate": Case(
        [*CLOZE, "copa"], [COPA, COPA | {"choice1": None}], ".jsonl:2: field 'choice1' is None; it must be", COPA_BY
    ),
    "an empty candidate": Case(
        [*CLOZE, "copa"], [COPA, COPA | {"choice1": " "}], f".jsonl:2: field 'choice1' {EMPTY}", COPA_BY
    ),
    "no such question": Case(
        [*CLOZE, "copa"], [COPA, COPA | {"question": "why"}], ".jsonl:2: field 'question' is 'why'; it must", COPA_BY
    ),
    "a negative offset": Case(
        [*CLOZE, "wic"], [WIC, WIC | {"start1": -1, "end1": 0}], ".jsonl:2: field 'start1' is -1", WIC_BY
    ),
    "no answers": Case([*CLOZE, "multirc"], [ANSWERLESS], ".jsonl:1: field 'answers' is empty", MULTIRC_BY),
    "no passage": Case([*CLOZE, "multirc"], [{"idx": 2, "passage": {}}], ".jsonl:1: field 'passage.", MULTIRC_BY),
    "a text for a label": Case(
        [*CLOZE, "boolq"], [BOOLQ, BOOLQ | {"label": "maybe"}], ".jsonl:2: field 'label' is 'maybe'; it", BOOLQ_BY
    ),
    "no label": Case([*CLOZE, "boolq"], [BOOLQ, BOOLQ | {"label": None}], f".jsonl:2: {MISSING}"),
    "an empty answer": Case(
        SEQ2SEQ,
        [PAIR, PAIR | {"target": " "}],
        f".jsonl:2: field 'target' {EMPTY}",
        "generation",
        f".jsonl:2: {EMPTY_ANSWER}",
    ),
    "no answer": Case(SEQ2SEQ, [PAIR, {"source": "the fox"}], ".jsonl:2: field 'target' is missing", "generation"),
    "an empty output": Case(SFT, [{"instruction": "the fox", "output": ""}], f".jsonl:1: field 'output' {EMPTY}"),
    "no completion": Case(SFT, [{"prompt": "the fox"}], ".jsonl:1: field 'completion' is missing"),
    "nothing of the assistant": Case(
        SFT, [{"messages": TURNS[:1]}], ".jsonl:1: field 'messages' has no answer of the assistant"
    ),
    "no such role": Case(
        SFT, [{"messages": TURNS}, {"messages": [ROBOT, *TURNS]}], ".jsonl:2: field 'messages[0].role' is 'robot'"
    ),
    "an empty message": Case(
        SFT, [{"messages": [TURNS[0], TURNS[1] | {"content": " "}]}], f".jsonl:1: field 'messages[1].content' {EMPTY}"
    ),
    "no rejected answer": Case(
        PREFER, [{"prompt": "the fox", "chosen": "jumps"}], ".jsonl:1: field 'rejected' is missing; there are: prompt"
    ),
    "answers to other questions": Case(
        PREFER,
        [{"chosen": TURNS, "rejected": [TURNS[0] | {"content": "it"}, TURNS[1]]}],
        ".jsonl:1: field 'rejected' has other messages in front of its answer than 'chosen'",
    ),
    "equal answers alone": Case(
        PREFER,
        [{"prompt": "the fox", "chosen": "jumps", "rejected": "jumps"}],
        ".jsonl:1: both answers are the same, as far as",
    ),
    "a label that is not among the labels": Case(
        CLASSIFY,
        [{"text": "fox", "label": "good"}, {"text": "fox", "label": "ugly"}],
        ".jsonl:2: field 'label' is 'ugly'",
    ),
    "a number whose square is infinite": Case(
        [*CLASSIFY[:2], "--kind", "regression"],
        [{"text": "fox", "label": 0.5}, {"text": "fox", "label": 10**400}],
        ".jsonl:2: field 'label' is 1000",
    ),
    "a number of no choice": Case(
        CHOOSE, [{"text": "fox", "choices": ["a", "b"], "label": 2}], ".jsonl:1: field 'label' is 2; it must be one of"
    ),
    "an empty choice": Case(
        CHOOSE, [{"text": "fox", "choices": ["a", " "], "label": 1}], ".jsonl:1: field 'choices' has ' ' at place 1"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_row_is_named_by_every_command_and_nothing_is_written(name, ask, place, tmp_path, test_data):
    case, rows = CASES[name], tmp_path / "rows"
    rows.mkdir()
    if isinstance(case.rows, str):
        for file in (test_data / "hostile").glob(f"{case.rows}*"):
            shutil.copy(file, rows / f"train{file.suffix}")
    else:
        (rows / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    (file,) = (path for path in rows.iterdir() if path.suffix != ".target")
    new = tmp_path / "new"
    learn = ["--finetune-from", "run", "--seq-length", "64", "--max-update", "1", "--device", "cpu", "--save-dir"]
    commands = [
        (train, [str(rows), *case.task, *learn, str(new), "--valid-subset", "none"], case.learned),
        (data, ["show", str(rows), *case.task, "--path", "run", "--split", "train"], case.learned),
    ]
    if case.evaluation is not None:
        asked = ["--evaluation", case.evaluation, "--data", str(file), "--path", "run", "--device", "cpu"]
        commands.append((evaluate, [*asked, "--output", str(new)], case.asked or case.learned))
    for command, arguments, message in commands:
        code, out, err = ask(command.main, *arguments)
        said = err[-1]
        assert (code, out, len(said.splitlines())) == (2, [], 1)
        assert f"{rows}/train{message}" in said
        assert "Traceback" not in "".join(err)
        assert [path.name for path in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize(
    ("task", "good", "bad"),
    [
        (SFT, {"instruction": "the fox", "output": "jumps"}, {"instruction": "the fox", "output": ""}),
        (PREFER, {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": ""}),
        (CLASSIFY, {"text": "fox", "label": "good"}, {"text": "fox", "label": "ugly"}),
    ],
)
def test_the_first_bad_rows_are_named_together(task, good, bad, ask, place, tmp_path):
    rows = [good if number % 10 else bad for number in range(1, 81)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, _, err = ask(data.main, "show", str(tmp_path), *task, "--path", "run", "--split", "train")
    *named, last = err[-6:]
    field = [*bad][-1]
    places = [f"{tmp_path}/train.jsonl:{number}: field '{field}' " for number in range(10, 60, 10)]
    assert [place in line for place, line in zip(places, named, strict=True)] == [True] * 5
    assert (code, last) == (2, "3 more rows cannot be read either")


GOOD_WORDS = "words: {0: ' bad', 1: ' good'}\nscoring: sum\npatterns:"
OWN = ["--task", "cloze", "--cloze", "FILE", "--seq-length", "64"]

# What is written into a file of the user's own, flags with it, and what is said.
TASKS = {
    "a template without the answer": (
        "roles: {user: {prefix: 'Q: '}}",
        ["--task", "sft", "--template", "FILE", *SHORT],
        "own.yaml: roles has no assistant; it needs user and assistant",
    ),
    "a pattern without the answer": (
        f"{GOOD_WORDS} ['It was {{text}}.']",
        OWN,
        "own.yaml: pattern 0: 'It was {text}.' has 0 gaps; it must have one {gap}",
    ),
    "a field that rows do not have": (
        f"{GOOD_WORDS} ['{{review}} It was{{gap}}.']",
        OWN,
        "train.jsonl:1: field 'review' is missing; there are: ",
    ),
    "a pair without the answer": (
        "",
        [*SEQ2SEQ, "--pattern", "{source}"],
        "--pattern is '{source}'; it must hold {} once",
    ),
    "a window that no other overlaps": (
        "",
        [*SEQ2SEQ, "--seq-length", "64", "--window-stride", "64"],
        "--window-stride is 64; it must be below --seq-length, 64, so that windows overlap; half of it is usual",
    ),
    "a text for windows alone": (
        "",
        [*SEQ2SEQ, "--no-answer", "none of it"],
        "--no-answer has no effect without --window-stride; add that, or leave --no-answer out",
    ),
    "answers without blanks": (
        "",
        ["--task", "glm_fill", *SHORT, "--seq-length", "64"],
        "train.jsonl:1: field 'target' has 1 answer, but field 'source' has 0 blanks; write one for each [MASK]",
    ),
    "a task forgotten": (
        "",
        [],
        "it has rows (train.jsonl), which these tasks read: classification, cloze, glm_fill, preference, seq2seq, sft",
    ),
    "a candidate that is too long": (
        "",
        [*CLOZE, "copa", "--seq-length", "8"],
        "take 72 tokens, which cannot be shortened (the longest of 8 such candidates); raise --seq-length (8) to 72",
    ),
    "answers that are too long for the model": (
        "",
        [*SEQ2SEQ[:2], "--target-length", "500", "--seq-length", "64"],
        "--seq-length 64 with --target-length 500 is too long for the model: an answer is 500 tokens long",
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_that_cannot_be_asked_is_named(name, ask, place, tmp_path):
    content, flags, message = TASKS[name]
    row = {**COPA, **PAIR, "text": "the fox", "prompt": "the fox", "completion": "jumps"}
    rows = [row, {**row, "choice1": f"{row['choice1']} {row['choice1']}"}]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "own.yaml").write_text(content)
    given = [str(tmp_path / "own.yaml") if flag == "FILE" else flag for flag in flags]
    learn = ["--finetune-from", "run", "--max-update", "1", "--device", "cpu", "--valid-subset", "none"]
    code, out, err = ask(train.main, str(tmp_path), *learn, *given, "--save-dir", str(tmp_path / "new"))
    assert (code, out, len(err) <= len(rows)) == (2, [], True)
    assert message in err[0]
    assert not (tmp_path / "new").exists()


def test_an_adapter_beside_another_base_is_refused_by_every_command(ask, place, second, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(PAIR) + "\n")
    learn = [
        "--finetune-from",
        "run",
        "--adapter",
        "lora",
        "--max-update",
        "1",
        "--device",
        "cpu",
        "--seq-length",
        "64",
    ]
    made, alone, new = (str(tmp_path / name) for name in ("made", "alone", "new"))
    assert ask(train.main, str(tmp_path), *SEQ2SEQ, *learn, "--valid-subset", "none", "--save-dir", made)[0] == 0
    assert ask(checkpoint.main, "adapter", made, alone)[0] == 0
    rows = str(tmp_path / "train.jsonl")
    commands = {
        evaluate: ["--path", alone, "--base", second, "--evaluation", "generation", "--data", rows, "--output", new],
        generate: [
            "--path",
            alone,
            "--base",
            second,
            "--input",
            "text",
            "--results-path",
            new,
            "--output-format",
            "json",
        ],
        checkpoint: ["merge", alone, new, "--base", second],
    }
    for command, arguments in commands.items():
        code, out, err = ask(command.main, *arguments)
        assert (code, out) == (2, [])
        assert "was trained beside other weights than those of" in err[-1]
        assert not Path(new).exists()
    make_chat_model(tmp_path / "other", num_layers=SHAPE["num_layers"], hidden_size=SHAPE["hidden_size"])
    for command in (evaluate, generate):
        arguments = [str(tmp_path / "other" / "run") if one == second else one for one in commands[command]]
        code, out, err = ask(command.main, *arguments)
        assert (code, out, len(err)) == (2, [], 1)
        assert f"{alone}: was trained beside other weights than those of" in err[-1]


def test_a_missing_extra_is_named(ask, place, tmp_path, monkeypatch):
    for package, scorer, extra in (("rouge_score", "rouge", "metrics"), ("sacrebleu", "bleu", "metrics")):
        monkeypatch.setitem(sys.modules, package, None)
        (tmp_path / "rows.jsonl").write_text(json.dumps(PAIR) + "\n")
        asked = ["--evaluation", "generation", "--scoring", scorer, "--data", str(tmp_path / "rows.jsonl")]
        code, out, err = ask(
            evaluate.main, "--path", "run", "--device", "cpu", *asked, "--output", str(tmp_path / "new")
        )
        assert (code, out, len(err)) == (2, [], 1)
        assert err[-1].endswith(f"install it by: pip install 'ftk[{extra}]'")
        assert not (tmp_path / "new").exists()


def test_the_missing_harness_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "ftk.evaluation.harness", raising=False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("ftk.evaluation.harness", run_name="__main__")
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ftk.evaluation.harness: the package lm_eval")
    assert line.endswith("is missing; install it by: pip install 'ftk[harness]'")
