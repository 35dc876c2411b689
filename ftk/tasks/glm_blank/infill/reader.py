"""A text with blanks as token ids: what counts as a blank, and what is refused because it nearly does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftk.errors import UserError
from ftk.generation.text import check_text
from ftk.tasks.glm_blank.infill.blanks import mask_ids
from ftk.tasks.glm_blank.infill.misspelt_blanks import refuse_misspelt_blanks

if TYPE_CHECKING:
    from ftk.tokenizers import Tokenizer

_BLANKS = {"[MASK]": "mask", "[sMASK]": "smask", "[gMASK]": "gmask"}


class BlankReader:
    """Reads texts with blanks.

    Args:
        tokenizer: has at least one of the tokens of blanks.

    Attributes:
        blanks: how each of them is written -> its id.
        masks: the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        ids = {text: getattr(tokenizer.special, name) for text, name in _BLANKS.items()}
        self.blanks: dict[str, int] = {text: mask for text, mask in ids.items() if mask is not None}
        self.masks = mask_ids(tokenizer.special)
        self._missing = [text for text, mask in ids.items() if mask is None]
        # What is put at the end of a text without a blank.
        self._last_blank = self.blanks.get("[gMASK]", next(iter(self.blanks.values())))
        own_names = [tokenizer.token_text(mask) for mask in self.blanks.values()]
        self._names = {*self.blanks, *(token.text for token in tokenizer.command_tokens)}
        self._pattern = re.compile("|".join(map(re.escape, {*self.blanks, *own_names})))

    def pieces(self, text: str) -> list[str]:
        """The text before, between and behind its blanks: one more than there are blanks."""
        return self._pattern.split(text.strip())

    def read(self, text: str, misspelt_blanks: str = "refuse") -> tuple[list[str], list[int]]:
        """A text as the model reads it: [CLS], the text, and end of text unless a [gMASK] is at the end.

        Args:
            text: a blank at its end is added if it has none.
            misspelt_blanks: "refuse" or "text".

        Returns:
            the text before, between and behind the blanks; all of it as ids.

        Raises:
            UserError: it is empty; the tokenizer lacks one of its blanks; one is misspelt ("[mask]").
        """
        check_text(text)
        if not text.strip():
            raise UserError("the prompt is empty; write a text, with [MASK] where something is missing")
        for blank in self._missing:
            if blank in text:
                raise UserError(f"this tokenizer has no {blank}; it has {', '.join(self.blanks)}")
        if misspelt_blanks == "refuse":
            refuse_misspelt_blanks(text, self._names, list(self.blanks))
        pieces, text, special = self.pieces(text), text.strip(), self.tokenizer.special
        # "[MASK]" is understood everywhere, also where the tokenizer's own name for it is another.
        for blank, token in self.blanks.items():
            text = text.replace(blank, self.tokenizer.token_text(token))
        ids = self.tokenizer.encode(text, command_tokens=True)
        if len(pieces) == 1:
            ids, pieces = [*ids, self._last_blank], [*pieces, ""]
        if sum(token in self.masks for token in ids) != len(pieces) - 1:
            raise UserError("the prompt holds a command token that counts as a blank here; remove it")
        if special.cls is not None and ids[0] != special.cls:
            ids = [special.cls, *ids]
        if special.eos is not None and ids[-1] not in (special.gmask, special.eos):
            ids = [*ids, special.eos]
        return pieces, ids


def filled(pieces: Sequence[str], answers: Sequence[str]) -> str:
    """A text with an answer in each blank; arguments as of `encode_answers`."""
    text = pieces[0]
    for answer, behind in zip(answers, pieces[1:], strict=True):
        text += (answer.strip() if not text or text[-1].isspace() else answer.rstrip()) + behind
    return text
