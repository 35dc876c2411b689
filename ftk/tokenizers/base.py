"""What every tokenizer offers: encode, decode, special tokens, vocabulary size, saving."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from ftk.errors import UserError
from ftk.tokenizers._texts import all_plain
from ftk.tokenizers.command_tokens import CommandToken, CommandTokenSplitter
from ftk.tokenizers.files import VocabularyFile, save_files

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Rows: TypeAlias = "list[list[int]] | list[npt.NDArray[np.int32]]"


@dataclass(kw_only=True)
class TokenizerConfig:
    """Options that every tokenizer has: where its vocabulary is, and which command tokens it gets."""

    path: str = field(
        metadata={
            "path": True,
            "help": "vocabulary: a file, or a folder that holds exactly one",
            "flag": "--tokenizer-path",
        }
    )
    block_symbols: bool = field(
        default=True, metadata={"help": "add <|startofpiece|> and <|endofpiece|>, which frame an answer"}
    )
    task_mask: bool = field(
        default=True, metadata={"help": "add [gMASK] and [sMASK], the blanks of documents and sentences"}
    )
    decoder_mask: bool = field(default=False, metadata={"help": "add [dBLOCK], which hides words inside answers"})

    def enabled(self) -> list[str]:
        """Which groups of command tokens exist: task_mask and decoder_mask come only with block_symbols."""
        if not self.block_symbols:
            return []
        return ["block_symbols", *(name for name in ("task_mask", "decoder_mask") if getattr(self, name))]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the command tokens by their role; None where the layout has no such token.

    `sentinels` holds a (mask, sop) pair per blank number, for tokenizers built with sentinel tokens.
    """

    pad: int | None = None
    eos: int | None = None
    cls: int | None = None
    mask: int | None = None
    smask: int | None = None
    gmask: int | None = None
    sop: int | None = None
    eop: int | None = None
    sep: int | None = None
    unk: int | None = None
    dblock: int | None = None
    sentinels: tuple[tuple[int, int], ...] = ()

    @property
    def mask_ids(self) -> tuple[int, ...]:
        """Ids that mark a blank: those of mask, smask and gmask that exist."""
        return tuple(id_ for id_ in (self.mask, self.smask, self.gmask) if id_ is not None)

    @classmethod
    def of(cls, tokens: Sequence[CommandToken]) -> SpecialTokens:
        """The roles of a list of command tokens, which carry the original's names."""
        ids = {token.name: token.id for token in tokens}
        roles = {"ENC": "cls", "MASK": "mask", "sMASK": "smask", "gMASK": "gmask", "dBLOCK": "dblock"}
        same = ("pad", "eos", "sop", "eop", "sep", "unk")
        named = {roles.get(name, name): id_ for name, id_ in ids.items() if name in roles or name in same}
        count = next(i for i in range(len(ids) + 1) if f"MASK{i + 1}" not in ids)
        pairs = tuple((ids[f"MASK{i}"], ids[f"sop{i}"]) for i in range(1, count + 1))
        return cls(**named, sentinels=pairs)


class Tokenizer(ABC):
    """Text to ids and back. Text tokens come from a library; command tokens are laid around them.

    A subclass sets `name` to the name that it registers under, reads its files in `__init__`, and says how
    plain text is encoded and ids are decoded. `batch_bytes` is how much text `encode_batch` encodes fastest.

    Args:
        config: its options.
        files: the vocabulary files, as read.
        command_tokens: in the order of their layout; where two share an id, the later one is decoded.
        num_text_tokens: size of the text vocabulary.
        text_offset: id of the first text token.
    """

    name: ClassVar[str]
    batch_bytes: ClassVar[int] = 1 << 17  # more need new pages from the system for each batch: a fifth slower

    def __init__(
        self,
        config: TokenizerConfig,
        *,
        files: Sequence[VocabularyFile],
        command_tokens: Sequence[CommandToken],
        num_text_tokens: int,
        text_offset: int = 0,
    ) -> None:
        self.config = config
        self.files = tuple(files)
        self.command_tokens = tuple(command_tokens)
        self.special = SpecialTokens.of(command_tokens)
        self.num_text_tokens = num_text_tokens
        self.text_offset = text_offset
        self.vocab_size = max(text_offset + num_text_tokens, 1 + max(token.id for token in command_tokens))
        self._command_texts = {token.id: token.text for token in command_tokens}
        self._splitter = CommandTokenSplitter(command_tokens)

    def encode(self, text: str, command_tokens: bool = False) -> list[int]:
        """The ids of `text`.

        Nothing is added at the ends. Text of white space alone has no ids (as in the original). Lone
        surrogates, which UTF-8 cannot write, count as U+FFFD.

        Args:
            text: any string.
            command_tokens: whether the literal names of command tokens ("[MASK]") stand for the tokens, as in
                a prompt. If not, as in a corpus, they are letters like others and become no command tokens.
        """
        text = well_formed(text)
        if not text.strip():
            return []
        if not command_tokens:
            return self._encode_text(text)
        ids: list[int] = []
        for part in self._splitter.split(text):
            if isinstance(part, CommandToken):
                ids.append(part.id)
            else:
                ids.extend(self._encode_text(part))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`[encode(text) for text in texts]`, faster: the library's threads share the work.

        With TOKENIZERS_PARALLELISM=false in the environment (worker processes), one thread does it.
        """
        return [row if isinstance(row, list) else row.tolist() for row in self.encode_rows(texts)]

    def encode_rows(self, texts: Sequence[str]) -> Rows:
        """`encode_batch` in the form that the library makes fastest: every row a list, or every one an array."""
        if not all_plain(texts):
            texts = ["" if text.isspace() else well_formed(text) for text in texts]
        return self._encode_texts(list(texts))

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, command tokens by name. Ids without a text (vocabulary padding) are left out.

        Args:
            ids: ints, or a 1-D array or tensor of them.
        """

    @abstractmethod
    def token_text(self, token_id: int) -> str:
        """How the vocabulary spells one id; "<unused 7>" where it has no token with that id."""

    def padded_vocab_size(self, multiple: int = 128) -> int:
        """The smallest multiple of `multiple` that holds the vocabulary: the number of embedding rows."""
        if multiple < 1:
            raise UserError(f"the vocabulary is padded to a multiple of {multiple}; it must be at least 1")
        return -(-self.vocab_size // multiple) * multiple

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of what decides the ids: name, options other than their defaults, file hashes."""
        content = [self.name, self._options(only_changed=True), [file.sha256 for file in self.files]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Copy the vocabulary files into `folder`, with `ftk_tokenizer.json`; `load_tokenizer` reads it.

        Raises:
            UserError: a vocabulary file has changed on disk since it was read.
        """
        described = {
            "name": self.name,
            "options": self._options(),
            "vocab_size": self.vocab_size,
            "command_tokens": {token.name: token.id for token in self.command_tokens},
            "fingerprint": self.fingerprint,
        }
        save_files(Path(folder), self.files, described)

    def _options(self, only_changed: bool = False) -> dict[str, Any]:
        fields = [f for f in dataclasses.fields(self.config) if f.name != "path"]
        values = {f.name: getattr(self.config, f.name) for f in fields}
        return {f.name: values[f.name] for f in fields if not only_changed or values[f.name] != f.default}

    @abstractmethod
    def _encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text; [] for ""."""

    @abstractmethod
    def _encode_texts(self, texts: list[str]) -> Rows:
        """`_encode_text` of each; either lists, or arrays [length] of int32."""


def well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD: what UTF-8 can write."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
