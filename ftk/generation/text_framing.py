"""How a model is asked in texts and in rows: its framing, and what its task puts around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftk.generation.engine.request import Framing

if TYPE_CHECKING:
    from ftk.data.supervised.row import Row

Converse = Callable[[str, Sequence[Mapping[str, Any]], Mapping[str, Any]], Any]
"""(last message, earlier ones with `role` and `content`, values of the template's variables) -> the prompt."""


class TextFraming:
    """The framing of a model, and how its task makes prompts of texts and of rows.

    Args:
        framing: whose attributes and methods this has, too.
        ask: (text, answer) -> the prompt, and the token ids of the answer with their end.
        converse: None: the task knows no conversations.
        of_row: row -> the questions that the task makes of it.
        of_text: text -> a question.
        encoded: questions -> for each, or for each of its windows, `prompt`, `answer`, `shown`, `reference`, `was_cut`
            and the `number` of the question, with the task's lengths.
        no_answer: what the model writes where a window does not hold the answer; None: it did not learn that.
    """

    def __init__(
        self,
        framing: Framing,
        ask: Callable[[str, str], tuple[Any, Sequence[int]]],
        converse: Converse | None,
        of_row: Callable[[Row], Iterable[Any]],
        of_text: Callable[[str], Any],
        encoded: Callable[[Sequence[Any]], Sequence[Mapping[str, Any]]],
        no_answer: str | None = None,
    ) -> None:
        self.framing, self.ask_text, self.converse = framing, ask, converse
        self.of_row, self.of_text, self.encoded, self.no_answer = of_row, of_text, encoded, no_answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "framing":  # looked for while an object is copied
            raise AttributeError(name)
        return getattr(self.framing, name)
