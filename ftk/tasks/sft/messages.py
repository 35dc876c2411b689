"""Conversations: what was said by whom, read from rows in the forms that data sets have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ftk.data.supervised.row import Row

SYSTEM, USER, INPUT, ASSISTANT = ROLES = ("system", "user", "input", "assistant")
"""Who says something; `input` is what a user's instruction is about."""

_ROLES = {"system": SYSTEM, "user": USER, "human": USER, "assistant": ASSISTANT, "gpt": ASSISTANT}
FORMS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""The field that holds messages -> the keys of who says what in each."""

_UNREAD = ("reasoning_content", "tool_calls", "function_call")
_NOT_LEARNED = "would not be learned; write it into the text of the answer, or take it out"


class Message(NamedTuple):
    """What one of `ROLES` says; an answer that is not `learned` is only read."""

    role: str
    text: str
    learned: bool = True


def messages_of(row: Row) -> list[Message]:
    """The conversation of a row.

    Args:
        row: with `messages` (role, content, perhaps `weight` 0 of an answer that is only read) or `conversations`
            (from, value); or `prompt` and `completion`; or `instruction` and `output`, perhaps with `input` and
            `history`, pairs of questions and answers; or `source` and `target`; each perhaps with `system`.

    Returns:
        at least one answer of the assistant, and in front of each something that is not.

    Raises:
        UserError: it has none of these forms, or something in it is not as it must be.
    """
    refuse_tools(row)
    return with_system(row, _said(row))


def refuse_tools(row: Row) -> None:
    """Raises UserError if a row has tools."""
    if row.values.get("tools") not in (None, [], "", "[]"):
        row.refuse("tools", _NOT_LEARNED)


def with_system(row: Row, messages: list[Message]) -> list[Message]:
    """The messages, behind what a row's field `system` says, if none of them is of the system.

    Raises:
        UserError: `system` and the system message differ.
    """
    if not row.values.get("system"):
        return messages
    own = Message(SYSTEM, row.text("system"))
    said = next((message.text for message in messages if message.role == SYSTEM), None)
    if said not in (None, own.text):
        row.refuse("system", "differs from the system message of the conversation; leave one of them out")
    return [own, *messages] if said is None else messages


def instruction_of(row: Row, field: str) -> list[Message]:
    """What a row asks by a field, behind its `history`; an instruction with its `input`."""
    has_input = field == "instruction" and row.values.get("input")
    given = [Message(INPUT, row.text("input"))] if has_input else []
    return [*_history(row), Message(USER, row.text(field)), *given]


def asked_messages(messages: Sequence[Any]) -> list[Message]:
    """A conversation that the user has the last word in.

    Args:
        messages: each with `role` and `content`.

    Raises:
        UserError: something in it is not as it must be.
    """
    row = Row({"messages": [*messages]}, "the prompt", 1)
    found = [*listed(row, "messages", *FORMS["messages"], is_asked=True)]
    if not found or found[-1].role != USER:
        row.refuse("messages", "does not end with a message of the user, which is answered")
    return found


def joined_input(messages: Sequence[Message]) -> list[Message]:
    """The messages, of which an input stands on a line of its own in the instruction that it belongs to."""
    found: list[Message] = []
    for message in messages:
        if message.role == INPUT:
            found[-1] = Message(USER, f"{found[-1].text}\n{message.text}")
        else:
            found.append(message)
    return found


def listed(row: Row, name: str, role_key: str, text_key: str, is_asked: bool = False) -> Iterator[Message]:
    """The messages of a field.

    Args:
        name: of the field.
        role_key, text_key: of `FORMS`.
        is_asked: whether none of them is learned.

    Raises:
        UserError: something in it is not as it must be, or would not be learned.
    """
    for number, message in enumerate(row.get(name, list)):
        place = f"{name}[{number}]"
        own = Row({place: message}, row.source, row.line)
        role = own.get(f"{place}.{role_key}", choices=_ROLES)
        no_weight = is_asked or message.get("weight") is None  # tables have null where other rows have a number
        is_learned = no_weight or own.get(f"{place}.weight", (int, float), (0, 1)) == 1
        for key in filter(message.get, _UNREAD if is_learned and not is_asked else ()):
            own.refuse(f"{place}.{key}", _NOT_LEARNED)
        if isinstance(message.get(text_key), list):
            message = message | {text_key: _joined(own, f"{place}.{text_key}")}
            own = Row({place: message}, row.source, row.line)
        if role != SYSTEM or message.get(text_key):  # data sets have empty ones
            is_answer = is_asked and _ROLES[role] == ASSISTANT  # which may have had no token
            yield Message(_ROLES[role], (own.get if is_answer else own.text)(f"{place}.{text_key}"), is_learned)


def _said(row: Row) -> list[Message]:
    for name, keys in FORMS.items():
        if name in row.values:
            return _checked(row, name, [*listed(row, name, *keys)])
    if "prompt" in row.values:
        return [Message(USER, row.text("prompt")), Message(ASSISTANT, row.text("completion"))]
    if "instruction" not in row.values and "source" in row.values:
        return [Message(USER, row.text("source")), Message(ASSISTANT, row.text("target"))]
    if "instruction" not in row.values:
        row.refuse(
            "instruction",
            "is missing; a row has instruction and output, prompt and completion, source and target, or messages with "
            "role and content",
        )
    answer = Message(ASSISTANT, row.text("output"))
    return [*instruction_of(row, "instruction"), answer]


def _joined(row: Row, field: str) -> str:
    """The text of a message in parts."""
    parts = row.get(field, list)
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        row.refuse(field, "has a part without text; only texts are learned")
    return "".join(texts)


def _checked(row: Row, name: str, messages: list[Message]) -> list[Message]:
    said = [message.role for message in messages if message.role != SYSTEM]
    if not any(message.role == ASSISTANT and message.learned for message in messages):
        row.refuse(name, "has no answer of the assistant to learn: there is none, or all have weight 0")
    if said[0] == ASSISTANT:
        row.refuse(name, "begins with an answer; a question must stand in front of it")
    return messages


def _history(row: Row) -> Iterator[Message]:
    pairs: Any = row.get("history", list) if row.values.get("history") else []
    for number, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2:
            row.refuse(f"history[{number}]", "is no pair of a question and its answer")
        for role, part, text in zip((USER, ASSISTANT), (0, 1), pair, strict=True):
            place = f"history[{number}][{part}]"
            yield Message(role, Row({place: text}, row.source, row.line).text(place))
