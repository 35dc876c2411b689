"""BERT's WordPiece.

Cleaning, lower-casing and splitting at punctuation are done here, with Python's Unicode tables and its rules
for lower case, as in the original; the `tokenizers` library's own BERT normaliser differs (it lower-cases a
Greek final sigma without context, and its Unicode tables are older) and is not used. The library cuts the
words into pieces.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from ftk.config import Chosen
from ftk.config.options import option
from ftk.errors import UserError
from ftk.registry import register_tokenizer
from ftk.tokenizers.base import Tokenizer, TokenizerConfig
from ftk.tokenizers.files import as_text, find_file, lines_of, read_file
from ftk.tokenizers.token_bytes import TokenBytes, word_pieces

_MAX_WORD_CHARACTERS = 100
_UNKNOWN = "[UNK]"
_CHINESE_RANGES = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


@dataclass(kw_only=True)
class BertWordPieceConfig(TokenizerConfig):
    casing: str = option(
        "auto",
        "uncased: lower-case the text, drop accents; auto: cased if a token has a capital",
        choices=("auto", "uncased", "cased"),
    )


@register_tokenizer("bert_wordpiece", config=BertWordPieceConfig)
class BertWordPieceTokenizer(Tokenizer):
    """WordPiece (Devlin et al. 2019). White space is lost and, in uncased vocabularies, case and accents.

    `path` is a vocabulary with one token per line, or a folder with one *vocab.txt.

    Raises:
        UserError: the file is missing or damaged, has empty or repeated lines, or is no BERT vocabulary.
    """

    name = "bert_wordpiece"

    def __init__(self, config: BertWordPieceConfig, special_tokens: Chosen | None = None) -> None:
        path = find_file(Path(config.path), "vocab.txt", "a WordPiece vocabulary, one token per line,")
        content, file = read_file(path)
        vocab = _parse_vocab(as_text(content, path), path)
        if _UNKNOWN not in vocab:
            raise UserError(f"{path}: holds no {_UNKNOWN}; is this the vocabulary of another kind of tokenizer?")
        self.lower_case = config.casing == "uncased" or (config.casing == "auto" and not _has_capitals(vocab))
        spellings = {id_: token for token, id_ in vocab.items()}
        super().__init__(
            config, special_tokens, files=(file,), num_text_tokens=len(vocab), vocab=vocab, spellings=spellings
        )
        self._cleaning = _Cleaning()
        self._splitting = _Splitting(drop_accents=self.lower_case)
        self._backend = tokenizers.Tokenizer(
            tokenizers.models.WordPiece(vocab=vocab, unk_token=_UNKNOWN, max_input_chars_per_word=_MAX_WORD_CHARACTERS)
        )
        self._backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()

    def decode(self, ids: Iterable[int]) -> str:
        """Words joined by single spaces; a piece "##x" is joined to what precedes it."""
        words: list[str] = []
        for id_ in ids:
            token = self._spellings.get(int(id_))
            if token is None:
                continue
            if token.startswith("##") and words:
                words[-1] += token[2:]
            else:
                words.append(token)
        return " ".join(words)

    def token_bytes(self) -> TokenBytes:
        return word_pieces(self._spellings, self.vocab_size, self._ids_without_text())

    def _encode_text(self, text: str) -> list[int]:
        return self._backend.encode(self._words(text), add_special_tokens=False).ids

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        words = [self._words(text) for text in texts]
        return [encoded.ids for encoded in self._backend.encode_batch_fast(words, add_special_tokens=False)]

    def ignores_case(self) -> bool:
        return self.lower_case

    def _words(self, text: str) -> str:
        """Words and punctuation marks with white space between them.

        Brackets are punctuation, so that a literal "[MASK]" falls apart and is never looked up as one word.
        """
        text = text.translate(self._cleaning)
        if self.lower_case:
            text = unicodedata.normalize("NFD", text.lower())
        return text.translate(self._splitting)


class _Cleaning(dict[int, "str | int | None"]):
    """str.translate table, filled as characters are met: no controls, plain spaces, Chinese apart."""

    def __missing__(self, code: int) -> str | int | None:
        character = chr(code)
        category = unicodedata.category(character)
        result: str | int | None = code
        if character in "\t\n\r" or category in ("Zs", "Zl", "Zp"):
            result = " "
        elif code == 0xFFFD or category.startswith("C"):
            result = None
        elif any(first <= code <= last for first, last in _CHINESE_RANGES):
            result = f" {character} "
        self[code] = result
        return result


class _Splitting(dict[int, "str | int | None"]):
    """str.translate table: punctuation apart and, for uncased vocabularies, combining accents dropped."""

    def __init__(self, drop_accents: bool) -> None:
        super().__init__()
        self._drop_accents = drop_accents

    def __missing__(self, code: int) -> str | int | None:
        character = chr(code)
        category = unicodedata.category(character)
        result: str | int | None = code
        if self._drop_accents and category == "Mn":
            result = None
        elif category.startswith("P") or character in "$+<=>^`|~":  # ASCII symbols count as punctuation
            result = f" {character} "
        self[code] = result
        return result


def _parse_vocab(text: str, path: Path) -> dict[str, int]:
    """token -> its line number from 0."""
    vocab: dict[str, int] = {}
    for i, line in enumerate(lines_of(text)):
        token = line.removesuffix("\r")
        if not token.strip():
            raise UserError(f"{path}:{i + 1}: the line is empty; each line of a vocabulary is one token")
        if token != token.strip():
            raise UserError(f"{path}:{i + 1}: {token!r} begins or ends with white space")
        if token in vocab:
            raise UserError(f"{path}:{i + 1}: {token!r} is already in line {vocab[token] + 1}")
        vocab[token] = i
    if not vocab:
        raise UserError(f"{path}: is empty; a vocabulary has one token per line")
    return vocab


def _has_capitals(vocab: dict[str, int]) -> bool:
    """Whether a token other than [CLS] and the like has an upper-case letter."""
    return any(token != token.lower() for token in vocab if not (token[0] == "[" and token[-1] == "]"))
