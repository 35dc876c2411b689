"""A prompt with blanks as the model reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftk.generation.results import EncodedText
from ftk.tasks.glm_blank.infill.framing import BlankPrompt


@dataclass(frozen=True)
class EncodedPrompt(EncodedText):
    """A prompt with blanks.

    Attributes:
        pieces: the text before, between and behind the blanks: one more than there are blanks.
    """

    pieces: Sequence[str] = ()

    @property
    def context(self) -> Sequence[int]:
        """Token ids, [CLS] and end of text included."""
        asked: BlankPrompt = self.request.prompt
        return asked.context

    @property
    def blanks(self) -> list[int]:
        """The ids of its blanks, from left to right."""
        return [self.context[place] for place in self.request.prompt.places.values()]
