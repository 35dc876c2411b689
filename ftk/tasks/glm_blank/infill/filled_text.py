"""A prompt's text while its blanks are filled, from left to right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftk.tasks.glm_blank.infill.results import EncodedPrompt
    from ftk.tokenizers import Tokenizer

_CONTEXT_FOR_SPACING = 8  # tokens before a blank that decide whether its answer begins with a space


class FilledText:
    """The text of a prompt as far as its blanks are filled.

    Args:
        tokenizer: from ids to text.
        masks: ids that stand for a blank.
        prompt: its pieces of text, and its ids.
        counts: what counts of an answer's text: all in front of a stop string.

    Attributes:
        text: up to the next blank; all of it when none is left.
        spans: where each answer stands in it.
        number: of the next blank, from 0 on.
    """

    def __init__(
        self, tokenizer: Tokenizer, masks: Sequence[int], prompt: EncodedPrompt, counts: Callable[[str], str]
    ) -> None:
        self.tokenizer = tokenizer
        self.masks = masks
        self.counts = counts
        self.text = prompt.pieces[0]
        self.spans: list[tuple[int, int]] = []
        self._pieces = iter(prompt.pieces[1:])
        self._context = iter(prompt.context)
        self._read: list[int] = []  # the ids of the text so far
        self._read_to_blank()

    @property
    def number(self) -> int:
        return len(self.spans)

    def fill(self, answer: Sequence[int]) -> None:
        """The next blank has this answer."""
        words = self.words(answer, self.counts)
        self.spans.append(self.span(words))
        self.text += words + next(self._pieces)
        self._read.extend(answer)
        self._read_to_blank()

    def words(self, answer: Sequence[int], counts: Callable[[str], str]) -> str:
        """How an answer to the next blank reads in its place, with the space in front of it, if there is one.

        Args:
            answer: ids.
            counts: what counts of its text.
        """
        words = counts(self._spaced(list(answer)))
        return words.lstrip() if not self.text or self.text[-1].isspace() else words

    def span(self, words: str) -> tuple[int, int]:
        """Where in the text these words will stand, without the space in front."""
        return len(self.text) + len(words) - len(words.lstrip()), len(self.text) + len(words)

    def _read_to_blank(self) -> None:
        for token in self._context:
            if token in self.masks:
                return
            if token != self.tokenizer.special.cls:
                self._read.append(token)

    def _spaced(self, answer: list[int]) -> str:
        """The answer as it reads behind what is before it, with the space that the tokenizer puts between."""
        before = self._read[-_CONTEXT_FOR_SPACING:]
        left, joined = self.tokenizer.decode(before), self.tokenizer.decode([*before, *answer])
        return joined[len(left) :] if joined.startswith(left) else f" {self.tokenizer.decode(answer)}"
