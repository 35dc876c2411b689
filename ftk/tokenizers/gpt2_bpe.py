"""GPT-2's byte-level BPE."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from ftk.config import Chosen
from ftk.errors import UserError, download_hint
from ftk.registry import register_tokenizer
from ftk.tokenizers.base import Tokenizer, TokenizerConfig
from ftk.tokenizers.files import as_text, read_file, single_file
from ftk.tokenizers.token_bytes import NO_SPACE, TokenBytes, byte_letters, spelled_with_letters

# Names of a vocabulary and its merges, after any common prefix ("gpt2-").
_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


@register_tokenizer("gpt2_bpe", config=TokenizerConfig)
class GPT2BPETokenizer(Tokenizer):
    """Byte-level BPE (Radford et al. 2019). Lossless: decoding an encoded text gives the text.

    `path` is a folder with *vocab.json and *merges.txt (or encoder.json and vocab.bpe), or one of the files.

    Raises:
        UserError: the files are missing, ambiguous, damaged, or not a byte-level BPE vocabulary.
    """

    name = "gpt2_bpe"

    def __init__(self, config: TokenizerConfig, special_tokens: Chosen | None = None) -> None:
        vocab_path, merges_path = _find_files(Path(config.path))
        vocab_bytes, vocab_file = read_file(vocab_path)
        merges_bytes, merges_file = read_file(merges_path)
        vocab = parse_vocab(as_text(vocab_bytes, vocab_path), vocab_path)
        merges = parse_merges(as_text(merges_bytes, merges_path), merges_path, vocab)
        files, spellings = (vocab_file, merges_file), {id_: spelling for spelling, id_ in vocab.items()}
        super().__init__(
            config, special_tokens, files=files, num_text_tokens=len(vocab), vocab=vocab, spellings=spellings
        )
        # "<|endoftext|>" is in the vocabulary, but it is not made an added token and no merge reaches it
        # (words are split between letters and other signs before merging): text cannot become it.
        self._backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
        self._backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        letter_bytes = {letter: byte for byte, letter in byte_letters().items()}
        self._bytes = {id_: spelled_with_letters(text, letter_bytes) for id_, text in self._spellings.items()}
        self._bytes |= {id_: text.encode() for text, id_ in self.added.ids.items()}

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join([self._bytes.get(int(id_), b"") for id_ in ids]).decode("utf-8", "replace")

    def token_bytes(self) -> TokenBytes:
        without = self._ids_without_text()
        return TokenBytes(
            [b"" if id_ in without else self._bytes.get(id_, b"") for id_ in range(self.vocab_size)], NO_SPACE
        )

    def _encode_text(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        return [encoded.ids for encoded in self._backend.encode_batch_fast(texts, add_special_tokens=False)]


def _find_files(path: Path) -> tuple[Path, Path]:
    """(vocabulary, merges) from a folder or from either file."""
    what = "a folder with vocab.json and merges.txt (or one of these files)"
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give {what}{download_hint(str(path), 'model')}")
    if path.is_dir():
        pairs = [pair for entry in sorted(path.iterdir()) for pair in _pairs_of(entry) if pair[0] == entry]
        whole = [vocab for vocab, merges in pairs if merges.is_file()]
        if pairs and not whole:
            raise UserError(f"{path}: holds {pairs[0][0].name} but not its merges {pairs[0][1].name}")
        vocab = single_file(path, whole, f"*{_PAIRS[0][0]}", what)
        return next(pair for pair in pairs if pair[0] == vocab)
    for vocab, merges in _pairs_of(path):
        other = merges if vocab == path else vocab
        if not other.is_file():
            raise UserError(f"{path}: its other half {other} is missing")
        return vocab, merges
    raise UserError(f"{path}: its name ends in neither vocab.json nor merges.txt; give {what}")


def _pairs_of(path: Path) -> Iterator[tuple[Path, Path]]:
    """The (vocabulary, merges) that a file name belongs to, if it is such a name."""
    for names in _PAIRS:
        for name in names:
            if path.name.endswith(name):
                prefix = path.name.removesuffix(name)
                yield path.with_name(prefix + names[0]), path.with_name(prefix + names[1])


def parse_vocab(text: str, path: Path) -> dict[str, int]:
    """spelling -> id of a vocab.json, which must number its tokens 0, 1, 2 ... in any order."""
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(_repeated(key for key, _ in pairs))
        return dict(pairs)

    try:
        vocab = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON ({error.msg} at column {error.colno})") from None
    except (RecursionError, ValueError):  # a ValueError for a number of thousands of digits
        raise UserError(f"{path}: not a vocabulary (nested too deeply, or a number is too long)") from None
    if not isinstance(vocab, dict) or not vocab:
        raise UserError(f'{path}: not a vocabulary; it must be an object of tokens and ids, {{"a": 0, ...}}')
    if twice:
        raise UserError(f"{path}: token {twice[0]!r} is in it twice")
    for token, id_ in vocab.items():
        if type(id_) is not int or id_ < 0:
            raise UserError(f"{path}: token {token!r} has the id {id_!r}; ids are whole numbers from 0")
        try:
            token.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{path}: token {token!r} holds a lone surrogate") from None
    repeated = next(iter(_repeated(vocab.values())), None)
    if repeated is not None:
        tokens = [token for token, id_ in vocab.items() if id_ == repeated][:2]
        raise UserError(f"{path}: tokens {tokens[0]!r} and {tokens[1]!r} have the same id {repeated}")
    if max(vocab.values()) >= len(vocab):
        raise UserError(f"{path}: {len(vocab)} tokens, but ids up to {max(vocab.values())}; gaps are not allowed")
    lacking = [byte for byte, letter in byte_letters().items() if letter not in vocab]
    if lacking:
        raise UserError(
            f"{path}: no token for {len(lacking)} of the 256 bytes (first: 0x{lacking[0]:02x}); "
            "a byte-level BPE vocabulary holds them all"
        )
    return vocab


def parse_merges(text: str, path: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of a merges.txt, best first; a first line "#version: ..." is skipped."""
    merges: dict[tuple[str, str], int] = {}
    lines = text.split("\n")
    for num, line in enumerate(lines, start=1):
        line = line.rstrip("\r")
        if (num == 1 and line.startswith("#version")) or (num == len(lines) and not line):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise UserError(f"{path}:{num}: {line[:80]!r} is not two parts with one space between them")
        left, right = parts
        lacking = next((token for token in (left, right, left + right) if token not in vocab), None)
        if lacking is not None:
            raise UserError(f"{path}:{num}: {lacking!r} is not in the vocabulary; do the files belong together?")
        if (left, right) in merges:
            raise UserError(f"{path}:{num}: the same merge is in line {merges[left, right]}")
        merges[left, right] = num
    return list(merges)


def _repeated(values: Iterable[Any]) -> list[Any]:
    seen: set[Any] = set()
    return [value for value in values if value in seen or seen.add(value)]  # type: ignore[func-returns-value]
