"""A tokenizer that learns further tokens: ids stay, and so do those of texts that hold none of the new tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ftk.errors import UserError
from ftk.tokenizers.base import Tokenizer
from ftk.tokenizers.build import with_vocabulary
from ftk.tokenizers.files import as_text, lines_of, read_file


class Growth(NamedTuple):
    """A grown tokenizer.

    Attributes:
        tokenizer: the new one, read from its folder.
        new: text -> id of the new tokens.
        known: texts that were one token already.
    """

    tokenizer: Tokenizer
    new: dict[str, int]
    known: list[str]


def read_tokens(path: str | os.PathLike[str]) -> list[str]:
    """The tokens of a file, one per line; white space at the ends of a line belongs to its token.

    Raises:
        UserError: the file cannot be read, holds no token, or one of white space alone.
    """
    path = Path(path)
    content, _ = read_file(path)
    tokens = [line.removesuffix("\r") for line in lines_of(as_text(content, path))]
    for number, token in enumerate(tokens, start=1):
        if not token.strip():
            raise UserError(f"{path}:{number}: the line is empty; each line is one token")
    if not tokens:
        raise UserError(f"{path}: is empty; each line is one token")
    return tokens


def grow_tokenizer(tokenizer: Tokenizer, texts: Sequence[str], folder: str | os.PathLike[str]) -> Growth:
    """Write a tokenizer with further tokens, whose ids follow its own, and read it.

    Args:
        tokenizer: with the special tokens that it is used with.
        texts: of the tokens; those that are one token already, and repeated ones, are left out.
        folder: to write; it is empty, or not there.

    Raises:
        UserError: a token would not be found in a text, or there is another tokenizer for sources.
    """
    if tokenizer.source is not None:
        raise UserError("a tokenizer with another one for sources cannot grow; train one with the tokens instead")
    folder = Path(folder)
    new: dict[str, int] = {}
    known: list[str] = []
    spelled = {token.text for token in tokenizer.command_tokens}
    for text in texts:
        key = text.lower() if tokenizer.ignores_case() else text
        if text in spelled or key in new or _is_one_token(tokenizer, text):
            known.append(text)
        else:
            new[key] = tokenizer.vocab_size + len(new)
    tokenizer.save(folder)
    vocabulary = tokenizer.write_added(new, folder)
    grown = with_vocabulary(tokenizer, vocabulary)
    grown.save(folder)
    wrong = [text for text, id_ in new.items() if grown.encode(text)[-1:] != [id_]]
    if wrong:
        raise UserError(f"{folder}: the token {wrong[0]!r:.60} is not found in a text; leave it out")
    return Growth(grown, new, known)


def _is_one_token(tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.encode(text)
    return len(ids) == 1 and ids[0] != tokenizer.special.unk
