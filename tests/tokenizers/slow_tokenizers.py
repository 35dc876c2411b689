"""The original's tokenization, slow and obviously right: what the fast paths are compared with. And a little text."""

from __future__ import annotations

import itertools
import re
import unicodedata
from functools import cache

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "she sells sea shells by the sea shore, doesn't she?",
    "a model fills blanks in a text; it is trained on text with blanks",
    "在 1807 年,人们为纪念而建造了凯旋门。",
]

BYTE_LETTERS: dict[int, str] = {}
for _byte in range(256):
    _printable = 0x21 <= _byte <= 0x7E or 0xA1 <= _byte <= 0xAC or _byte >= 0xAE
    BYTE_LETTERS[_byte] = chr(_byte) if _printable else chr(256 + sum(v >= chr(256) for v in BYTE_LETTERS.values()))

# Unicode's White_Space; Python's isspace() counts U+001C to U+001F as well, GPT-2's pattern does not.
WHITE_SPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)
CHINESE = [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
           (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)]  # fmt: skip


def basic_words(text: str, lower_case: bool) -> list[str]:
    """BERT's words: cleaned, Chinese characters apart, without case and accents, split at punctuation."""
    cleaned = ""
    for character in text:
        category = unicodedata.category(character)
        if character in "\t\n\r" or category == "Zs":
            cleaned += " "
        elif character not in "\0\ufffd" and category[0] != "C":
            chinese = any(first <= ord(character) <= last for first, last in CHINESE)
            cleaned += f" {character} " if chinese else character
    words: list[str] = []
    for word in cleaned.split():
        if lower_case:
            decomposed = unicodedata.normalize("NFD", word.lower())
            word = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
        spaced = "".join(f" {c} " if is_punctuation(c) else c for c in word)
        words += spaced.split()
    return words


def is_punctuation(character: str) -> bool:
    code = ord(character)
    ascii_sign = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    return ascii_sign or unicodedata.category(character).startswith("P")


def wordpiece(word: str, vocab: dict[str, int]) -> list[str]:
    """Longest match first; a word that is too long or cannot be written is one [UNK]."""
    if len(word) > 100:
        return ["[UNK]"]
    pieces: list[str] = []
    start = 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in vocab:
                break
        else:
            return ["[UNK]"]
        pieces.append(piece)
        start = end
    return pieces


def bert_ids(text: str, vocab: dict[str, int], lower_case: bool = True) -> list[int]:
    return [vocab[piece] for word in basic_words(text, lower_case) for piece in wordpiece(word, vocab)]


@cache
def gpt2_pattern() -> re.Pattern[str]:
    """GPT-2's word pattern, its \\p{L} and \\p{N} written out as character ranges."""
    kinds = "".join(unicodedata.category(chr(code))[0] for code in range(0x110000))
    letters, numbers = (
        "".join(f"\\U{run.start():08x}-\\U{run.end() - 1:08x}" for run in re.finditer(f"{kind}+", kinds))
        for kind in "LN"
    )
    space = re.escape(WHITE_SPACE)
    return re.compile(
        f"'s|'t|'re|'ve|'m|'ll|'d| ?[{letters}]+| ?[{numbers}]+| ?[^{space}{letters}{numbers}]+"
        f"|[{space}]+(?![^{space}])|[{space}]+"
    )


def bpe(word: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Merge the best pair everywhere, again and again."""
    while True:
        pairs = [pair for pair in itertools.pairwise(word) if pair in ranks]
        if not pairs:
            return word
        best = min(pairs, key=ranks.__getitem__)
        merged: list[str] = []
        for symbol in word:
            if merged and (merged[-1], symbol) == best:
                merged[-1] += symbol
            else:
                merged.append(symbol)
        word = merged


def gpt2_ids(text: str, vocab: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    words = gpt2_pattern().findall(text)
    return [vocab[s] for word in words for s in bpe([BYTE_LETTERS[b] for b in word.encode()], ranks)]


def split_on_tokens(text: str, tokens: list[tuple[str, bool]]) -> list[str]:
    """The text cut at one command token after the other: (name, whether it swallows spaces on its left)."""
    parts = [text]
    names = [name for name, _ in tokens]
    for name, swallows in tokens:
        cut: list[str] = []
        for part in parts:
            if part in names:
                cut.append(part)
                continue
            pieces = part.split(name)
            for i, piece in enumerate(pieces):
                last = i == len(pieces) - 1
                if swallows and not last:
                    piece = piece.rstrip()
                cut += [piece] if piece else []
                cut += [] if last else [name]
        parts = cut
    return parts
