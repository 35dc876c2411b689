"""Predictions in the form in which SuperGLUE takes them: a file for each task, with lines of idx and label."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from ftk.data.supervised.squad import NO_ANSWER
from ftk.evaluation.metrics import Record

_NAMES = {
    "ax_b": "AX-b",
    "ax_g": "AX-g",
    "boolq": "BoolQ",
    "cb": "CB",
    "copa": "COPA",
    "multirc": "MultiRC",
    "record": "ReCoRD",
    "rte": "RTE",
    "wic": "WiC",
    "wsc": "WSC",
}


def of_choices(cloze: str, reader: str, records: Sequence[Record]) -> tuple[str, str]:
    """The file of a cloze task.

    Args:
        reader: of its rows, which those of a task of a user's own may share with one of SuperGLUE.
        records: of all rows, whether they have labels or not.

    Returns:
        the file's name, and its text: a JSON object per row.
    """
    lines = _by_passage(records) if reader == "multirc" else _by_row(reader, records)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return f"{_NAMES.get(cloze, PurePath(cloze).stem)}.jsonl", text


def of_answers(records: Sequence[Record]) -> tuple[str, str]:
    """The file of SQuAD's and CMRC's script: an object of ids and answers, "" for none."""
    answers = {str(record["idx"]): "" if record["chosen"] == NO_ANSWER else record["chosen"] for record in records}
    return "squad.json", json.dumps(answers, ensure_ascii=False) + "\n"


def _by_row(reader: str, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    for record in records:
        label = record["chosen"]
        if isinstance(label, bool):
            label = str(label) if reader == "wsc" else str(label).lower()
        yield {"idx": record["idx"], "label": "" if label is None else label}


def _by_passage(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """MultiRC's answers, nested as its rows are."""
    passages: dict[Any, dict[Any, list[dict[str, Any]]]] = {}
    for record in records:
        passage, question, answer = record["idx"]
        questions = passages.setdefault(passage, {})
        questions.setdefault(question, []).append({"idx": answer, "label": record["chosen"]})
    for passage, questions in passages.items():
        nested = [{"idx": question, "answers": answers} for question, answers in questions.items()]
        yield {"idx": passage, "passage": {"questions": nested}}
