"""Questions about paragraphs as SQuAD and CMRC 2018 write them, one JSON object in a file, as rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftk.data.supervised.row import Row
from ftk.errors import shown

NO_ANSWER = "N/A"
"""The answer to a question that has none (SQuAD 2.0), as Du et al. (2022) write it."""

ANSWER_FIELDS = ("answer", "target", "output")
"""Fields that hold the first right answer."""


def is_squad(tree: Any) -> bool:
    """Whether a JSON value is such a file."""
    data = tree.get("data") if isinstance(tree, dict) else None
    return isinstance(data, list) and any(isinstance(article, dict) and "paragraphs" in article for article in data)


def squad_rows(tree: Any, path: str) -> Iterator[Row]:
    """A row for each question.

    It has `id`, `question`, `context`; `answers`, the distinct right answers, and `answer`, the first of them; the same
    under the names of other tasks' rows: `source` (question and context) with `target`, `instruction` and `input` with
    `output`. Where the file has no answers, as for tests, the row has none.

    Args:
        tree: the file's value; `is_squad` is true of it.

    Raises:
        UserError: something in it is not as it must be.
    """
    for article in _objects(Row(tree, path, 1), "data"):
        for paragraph in _objects(article, "paragraphs"):
            context = paragraph.text("context")
            for question in _objects(paragraph, "qas"):
                yield Row(_question_values(question, context), path, question.line, question.name)


def _question_values(row: Row, context: str) -> dict[str, Any]:
    question = row.get("question").strip()
    values = {"id": row.values.get("id", row.name), "question": question, "context": context}
    values |= {"source": f"{question} {context}".strip(), "instruction": question, "input": context}
    if "answers" in row.values:
        answers = [*dict.fromkeys(answer.text("text") for answer in _objects(row, "answers"))]
        if not answers and row.values.get("is_impossible") is not True:
            row.refuse("answers", "is empty; write at least one, or is_impossible true")
        answers = answers or [NO_ANSWER]
        values |= {"answers": answers, **dict.fromkeys(ANSWER_FIELDS, answers[0])}
    return values


def _objects(row: Row, field: str) -> Iterator[Row]:
    """The objects of a list as rows, with their places in the file."""
    for number, value in enumerate(row.get(field, list)):
        if not isinstance(value, dict):
            row.refuse(field, f"holds {shown(value)}; it must be a list of objects")
        yield Row(value, row.source, number + 1, f"{row.name}.{field}[{number}]".removeprefix("."))
