"""Blanks that are not written as blanks are: [mask], <mask>, 【MASK】. Nobody wants these read as text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence

from ftk.errors import UserError

_STRAIGHT = "[<{［＜｛【〔〖"
_ROUND = "(（「《〈"  # around ordinary words of a text, too
_CLOSING = "]>}］＞｝】〕〗)）」》〉"
_BRACKETED = re.compile(
    f"([{re.escape(_STRAIGHT + _ROUND)}])([^{re.escape(_STRAIGHT + _ROUND + _CLOSING)}]{{1,20}})[{re.escape(_CLOSING)}]"
)
_BESIDE_LETTERS = re.compile(r"[\s\d|*_.:\\'\"`\u00ad\u200b-\u200f\u2060\ufeff-]")  # what cannot be seen, too
_WORDS = {"mask": "MASK", "smask": "sMASK", "gmask": "gMASK"}
_INDEXED = re.compile(r"[A-Za-z0-9_)]\[\s*mask\s*\]$")  # data[mask] in a program


def refuse_misspelt_blanks(text: str, names: Collection[str], blanks: Sequence[str]) -> None:
    """Refuses a prompt with something that was surely meant as a blank and is none.

    That is the word of a blank in brackets, whatever its case, its brackets, and the spaces or digits beside it; in
    round brackets, which stand in ordinary text, only in capitals. An index of a program, data[mask], is left alone.

    Args:
        names: what is understood as a command token.
        blanks: those of them that are blanks, in the order in which they are named.

    Raises:
        UserError: with the spelling, its place, and the right one.
    """
    for match in _BRACKETED.finditer(text):
        if match[0] in names or _INDEXED.search(text, max(0, match.start() - 1), match.end()):
            continue
        meant = _meant(_BESIDE_LETTERS.sub("", unicodedata.normalize("NFKC", match[2])), match[1] in _ROUND)
        if meant is not None:
            name, known = f"[{meant}]", ", ".join(blanks)
            remedy = f"write {name} (this tokenizer has {known})" if name in blanks else f"this tokenizer has {known}"
            raise UserError(
                f"{match[0]!r} at character {match.start() + 1} is not a blank; {remedy}, "
                "or have it read as text with `misspelt_blanks` text"
            )


def _meant(word: str, is_in_round_brackets: bool) -> str | None:
    """The word of a blank that `word` was meant as, if any."""
    if is_in_round_brackets and not word.endswith("MASK"):
        return None
    return _WORDS.get(word.casefold())
