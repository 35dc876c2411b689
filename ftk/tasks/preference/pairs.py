"""Pairs of answers, one of which is preferred, read from rows in the forms that data sets have."""

from __future__ import annotations

from typing import NamedTuple

from ftk.data.supervised.row import Row
from ftk.tasks.sft.messages import ASSISTANT, FORMS, Message, instruction_of, listed, refuse_tools, with_system

_ASKED = ("prompt", "question", "instruction", "input")


class Pair(NamedTuple):
    """Two answers to the same messages."""

    messages: list[Message]
    chosen: str
    rejected: str
    place: str


def pair_of(row: Row) -> Pair:
    """The pair of a row.

    Args:
        row: with `chosen` and `rejected`: texts, or messages of which the last is the answer. What is asked are the
            messages in front of it, which are the same of both; `prompt`, messages or a text; `question`, `instruction`
            (perhaps with an `input`) or `input`, perhaps with `history`; `messages` or `conversations`; perhaps with
            `system`.

    Raises:
        UserError: it has none of these forms, or something in it is not as it must be.
    """
    refuse_tools(row)
    (before, chosen), (other, rejected) = (_answer(row, field) for field in ("chosen", "rejected"))
    if before != other:
        row.refuse("rejected", "has other messages in front of its answer than 'chosen'; they must be the same")
    messages = with_system(row, _asked(row, before))
    if not messages or messages[-1].role == ASSISTANT:
        row.refuse("chosen", "answers nothing: a message of the user must stand in front of it")
    return Pair(messages, chosen, rejected, row.place)


def _answer(row: Row, field: str) -> tuple[list[Message], str]:
    """The messages in front of an answer, if its field has some, and its text."""
    value = row.values.get(field)
    if isinstance(value, dict):
        row = Row({**row.values, field: [value]}, row.source, row.line, row.name)
    elif not isinstance(value, list):
        return [], row.text(field)
    messages = _messages(row, field)
    if not messages or messages[-1].role != ASSISTANT:
        row.refuse(field, "does not end with a message of the assistant, which is the answer")
    return messages[:-1], messages[-1].text


def _asked(row: Row, before: list[Message]) -> list[Message]:
    """What is asked; `before`: the messages in front of the answer."""
    field = next((name for name in (*FORMS, *_ASKED) if row.values.get(name) is not None), None)
    if field is not None and isinstance(row.values[field], list):
        asked = _messages(row, field)
        shared = min(len(before), len(asked))  # data sets have a whole conversation beside `chosen`, with its answer
        return before if before and before[:shared] == asked[:shared] else asked + before
    if before:
        return before  # some data sets repeat the first or the last of these in another field
    if field is None:
        row.refuse(
            "prompt",
            "is missing; a row has chosen and rejected with prompt, question, instruction or conversations, or "
            "conversations in both",
        )
    return instruction_of(row, field)


def _messages(row: Row, field: str) -> list[Message]:
    values = row.values[field]
    has_from = bool(values) and isinstance(values[0], dict) and "from" in values[0]
    return [*listed(row, field, *FORMS["conversations" if has_from else "messages"])]
