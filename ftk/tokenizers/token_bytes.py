"""What each token writes, in bytes: for guides, which allow a token by what it adds to the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ftk.errors import UserError

NO_SPACE, MAYBE_SPACE, ALWAYS_SPACE = "", "maybe", "always"
META = "\u2581"
"""What SentencePiece and the library `tokenizers` write for a space."""

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_DECODERS = "ByteLevel, Metaspace, WordPiece, or SentencePiece's with ByteFallback"


class TokenBytes(NamedTuple):
    """What the tokens of a vocabulary write.

    Attributes:
        of_ids: for each id what it adds to a text behind other tokens; b"" where it writes none that can be relied on:
            command tokens, the unknown token, padding.
        first_space: whether the first token of a text has a space in front that the text does not show: `NO_SPACE`,
            `MAYBE_SPACE` (tokens with and without one may come first), `ALWAYS_SPACE`.
    """

    of_ids: list[bytes]
    first_space: str


def spelled_with_meta(spelling: str, *, bytes_too: bool = True) -> bytes:
    """The bytes of a piece of SentencePiece: its text with spaces or, of "<0x0A>" with `bytes_too`, its byte."""
    found = _BYTE.fullmatch(spelling) if bytes_too else None
    return bytes([int(found[1], 16)]) if found else spelling.replace(META, " ").encode()


def byte_letters() -> dict[int, str]:
    """byte -> the printable character that spells it in a vocabulary of byte-level BPE (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def spelled_with_letters(text: str, letter_bytes: Mapping[str, int]) -> bytes:
    """The bytes that such a vocabulary's entry stands for; an entry in no byte spelling stands for itself."""
    if all(letter in letter_bytes for letter in text):
        return bytes(letter_bytes[letter] for letter in text)
    return text.encode("utf-8")


def word_pieces(spellings: Mapping[int, str], size: int, without: Iterable[int]) -> TokenBytes:
    """Of words with spaces between them, to which pieces that begin with ## are joined."""
    found = [b""] * size
    for id_ in {*spellings} - {*without}:
        text = spellings[id_]
        found[id_] = (text.removeprefix("##") if text.startswith("##") else f" {text}").encode()
    return TokenBytes(found, ALWAYS_SPACE)


def whole_words(name: str) -> UserError:
    """The error for a vocabulary of whole words: a guide cannot tell that none ends as one has begun."""
    return UserError(f"guide: the tokens of {name} are whole words, of which a guide cannot make others; leave it out")


def library_bytes(backend: Any, size: int, without: Iterable[int], name: str) -> TokenBytes:
    """Of a tokenizer of the library `tokenizers`, by its decoder.

    Args:
        size: of its vocabulary.
        without: ids that write nothing here.
        name: of the tokenizer, for messages.

    Raises:
        UserError: its decoder writes a token differently behind others.
    """
    described = json.loads(backend.to_str())["decoder"]
    spellings = {id_: text for text, id_ in backend.get_vocab(with_added_tokens=True).items()}
    if described is None:  # the library puts spaces between tokens
        raise whole_words(name)
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    kinds = [step["type"] for step in steps]
    found = [b""] * size
    own = {id_: text for id_, text in spellings.items() if id_ not in {*without}}
    if kinds == ["ByteLevel"]:
        letters = {letter: byte for byte, letter in byte_letters().items()}
        for id_, text in own.items():
            found[id_] = spelled_with_letters(text, letters)
        return TokenBytes(found, NO_SPACE)
    if kinds == ["WordPiece"]:  # cleans each token up by itself
        for id_, text in own.items():
            found[id_] = backend.decoder.decode(["a", text])[1:].encode()
        return TokenBytes(found, ALWAYS_SPACE)
    if kinds == ["Metaspace"]:
        always = steps[0].get("prepend_scheme", "always") != "never"
        for id_, text in own.items():
            # Of a first token the library drops every such sign, those within it, too.
            if not (always and META in text.lstrip(META)):
                found[id_] = text.replace(steps[0]["replacement"], " ").encode()
        return TokenBytes(found, MAYBE_SPACE if always else NO_SPACE)
    if _is_sentence_pieces(steps):
        for id_, text in own.items():
            found[id_] = spelled_with_meta(text)
        return TokenBytes(found, MAYBE_SPACE if "Strip" in kinds else NO_SPACE)
    raise UserError(
        f"guide: the text of a token of {name} depends on its neighbours (decoder {', '.join(kinds)}); guides need "
        f"one of {_DECODERS}"
    )


def _is_sentence_pieces(steps: list[dict[str, Any]]) -> bool:
    """Whether the steps of a decoder are LLaMA's: signs to spaces, bytes, one text, without its first space."""
    wanted: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": META}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return steps in (wanted, [*wanted, {"type": "Strip", "content": " ", "start": 1, "stop": 0}])
