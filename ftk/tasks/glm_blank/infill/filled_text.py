"""A prompt's text while its blanks are filled, from left to right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ftk.generation.token_text import text_behind

if TYPE_CHECKING:
    from ftk.tasks.glm_blank.infill.results import EncodedPrompt
    from ftk.tokenizers import Tokenizer


class FilledText:
    """The text of a prompt as far as its blanks are filled.

    Args:
        tokenizer: from ids to text.
        masks: ids that stand for a blank.
        prompt: its pieces of text, and its ids.

    Attributes:
        text: up to the next blank; all of it when none is left.
        spans: where each answer stands in it.
        number: of the next blank, from 0 on.
    """

    def __init__(self, tokenizer: Tokenizer, masks: Sequence[int], prompt: EncodedPrompt) -> None:
        self.tokenizer = tokenizer
        self.masks = masks
        self.cut = prompt.request.processors.cut
        self.text = prompt.pieces[0]
        self.spans: list[tuple[int, int]] = []
        self._pieces = iter(prompt.pieces[1:])
        self._context = iter(prompt.context)
        self._read: list[int] = []  # the ids of the text so far
        # The beginning of the next answer: the length of its text alone, and its text in its place.
        self._begun: tuple[int, str] | None = None
        self._read_to_blank()

    @property
    def number(self) -> int:
        return len(self.spans)

    def fill(self, answer: Sequence[int]) -> None:
        """The next blank has this answer, ids."""
        words = self._in_place(self.cut(self._behind(answer)))
        self.spans.append(self.span(words))
        self.text += words + next(self._pieces)
        self._read.extend(answer)
        self._begun = None
        self._read_to_blank()

    def begin(self, answer: Sequence[int], text: str, settled: Callable[[str], str]) -> str:
        """How the beginning of an answer to the next blank reads in its place; it may only become longer.

        Args:
            answer: its ids so far.
            text: the same, as it reads alone.
            settled: the part of its text that later tokens do not change.
        """
        if self._begun is None:  # only its first word depends on what is in front
            self._begun = len(text), self._behind(answer)
        length, first = self._begun
        return self._in_place(settled(first + text[length:])).rstrip()

    def span(self, words: str) -> tuple[int, int]:
        """Where in the text these words will stand, without the space in front."""
        return len(self.text) + len(words) - len(words.lstrip()), len(self.text) + len(words)

    def _behind(self, answer: Sequence[int]) -> str:
        return text_behind(self.tokenizer.decode, self._read, answer, separator=" ")

    def _in_place(self, words: str) -> str:
        """Words with the space in front of them, unless the text ends in one."""
        return words.lstrip() if not self.text or self.text[-1].isspace() else words

    def _read_to_blank(self) -> None:
        start = self.tokenizer.special.cls
        for token in self._context:
            if token in self.masks:
                return
            if token != start:
                self._read.append(token)
