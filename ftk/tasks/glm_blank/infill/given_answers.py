"""Answers that are given instead of found, as ids: spelled as they would stand in their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftk.errors import UserError

if TYPE_CHECKING:
    from ftk.tasks.glm_blank.infill.results import EncodedPrompt
    from ftk.tokenizers import Tokenizer


def encode_answers(tokenizer: Tokenizer, prompt: EncodedPrompt, answers: Sequence[str]) -> list[list[int]]:
    """The ids of an answer to each blank, spelled as behind the text before it: after a space, or right there.

    Raises:
        UserError: there are more answers than blanks, or fewer; one text is given in place of a list.
    """
    if isinstance(answers, str):
        raise UserError(f"the answers of a prompt are a list of texts, one for each blank; write [{answers!r:.40}]")
    blanks = len(prompt.pieces) - 1
    if len(answers) != blanks:
        raise UserError(f"{len(answers)} answers for {blanks} blank{'s' * (blanks != 1)}; give one for each")
    return [_encoded(tokenizer, *pair) for pair in zip(prompt.pieces[:-1], answers, strict=True)]


def _encoded(tokenizer: Tokenizer, before: str, answer: str) -> list[int]:
    """The ids of an answer behind the text `before`."""
    text = answer.strip()
    if not text:
        return []
    if not before or before[-1].isspace() or answer[0].isspace():
        return tokenizer.encode(f" {text}" if before or answer[0].isspace() else text)
    left, joined = tokenizer.encode(before[-1]), tokenizer.encode(before[-1] + text)
    return joined[len(left) :] if joined[: len(left)] == left else tokenizer.encode(text)
