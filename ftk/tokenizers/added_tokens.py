"""Tokens that were added to a finished vocabulary: their texts are found first, the rest is encoded as before."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

from ftk.errors import UserError, naming_place
from ftk.files import write_whole
from ftk.parsing import parse_json
from ftk.tokenizers.files import MAX_IDS, VocabularyFile, as_text, read_file

ADDED_TOKENS = "ftk_added_tokens.json"
"""Companions a vocabulary: text -> id."""


class AddedTokens:
    """Finds added tokens in a text, the longest first, also within words.

    Args:
        ids: text -> id.
        ignore_case: whether the tokenizer ignores case.
    """

    def __init__(self, ids: Mapping[str, int], ignore_case: bool = False) -> None:
        self.ids = {text.lower() if ignore_case else text: id_ for text, id_ in ids.items()}
        self._ignore_case = ignore_case
        self._longest_first = sorted(self.ids, key=len, reverse=True)
        self._flags = re.IGNORECASE if ignore_case else 0
        self._pattern = re.compile("|".join(map(re.escape, self._longest_first)) or "(?!)", self._flags)

    def __bool__(self) -> bool:
        return bool(self.ids)

    def occur_in(self, text: str) -> bool:
        """Whether a text holds one."""
        return self._pattern.search(text) is not None

    def split(self, text: str) -> Iterator[str | int]:
        """The parts of a text in order: ordinary text (never empty) and ids of added tokens."""
        start = 0
        for match in self._pattern.finditer(text):
            if match.start() > start:
                yield text[start : match.start()]
            yield self._id_of(match.group())
            start = match.end()
        if start < len(text):
            yield text[start:]

    def _id_of(self, found: str) -> int:
        """The id of a token in the spelling of a text."""
        id_ = self.ids.get(found.lower() if self._ignore_case else found)
        if id_ is not None:
            return id_
        # The long s is an "s" to `re`, and no capital of it; so are some other letters.
        match = self._one_by_one.fullmatch(found)
        assert match is not None, "a token was found"
        assert match.lastindex is not None, "each is a group"
        return self.ids[self._longest_first[match.lastindex - 1]]

    @cached_property
    def _one_by_one(self) -> re.Pattern[str]:
        """With a group for each token, which is slower in a long text."""
        return re.compile("|".join(f"({re.escape(text)})" for text in self._longest_first), self._flags)


def read_added_tokens(vocabulary: Path) -> tuple[dict[str, int], tuple[VocabularyFile, ...]]:
    """Text -> id of the tokens that were added to a vocabulary, and the file that says so, if there is one.

    Raises:
        UserError: the file is damaged.
    """
    path = vocabulary.with_name(ADDED_TOKENS)
    if not path.is_file():
        return {}, ()
    content, file = read_file(path)
    with naming_place(path, ValueError):
        found = parse_json(as_text(content, path))
    right = isinstance(found, dict) and all(
        text and type(id_) is int and 0 <= id_ < MAX_IDS for text, id_ in found.items()
    )
    if not right or len({*found.values()}) < len(found):
        raise UserError(f"{path}: must hold tokens and their ids, each id once and below {MAX_IDS}")
    return found, (file,)


def write_added_tokens(folder: Path, ids: Mapping[str, int]) -> None:
    """Write the file that `read_added_tokens` reads."""
    write_whole(folder / ADDED_TOKENS, json.dumps(ids, indent=1, ensure_ascii=False) + "\n")
