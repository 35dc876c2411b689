"""What every tokenizer offers: encode, decode, special tokens, vocabulary size, saving."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from ftk.builtins import UNNAMED_SPECIAL_TOKENS
from ftk.config import Chosen
from ftk.config.options import required
from ftk.errors import UserError
from ftk.registry import SPECIAL_TOKENS
from ftk.tokenizers._texts import all_plain
from ftk.tokenizers.added_tokens import AddedTokens, read_added_tokens, write_added_tokens
from ftk.tokenizers.files import VocabularyFile, read_template, save_files
from ftk.tokenizers.special_tokens import PLAIN, CommandToken, CommandTokenSplitter, SpecialTokens, number
from ftk.tokenizers.token_bytes import TokenBytes

Rows: TypeAlias = "list[list[int]] | list[Any]"  # ids of texts: lists, or all of them buffers of int32


@dataclass(kw_only=True)
class TokenizerConfig:
    """Options that every tokenizer has: where its vocabulary is."""

    path: str = required(
        "vocabulary: a file, or a folder that holds exactly one",
        daily=True,
        path=True,
        flag="--tokenizer-path",
        instead="vocab_size",
    )


class Tokenizer(ABC):
    """Text to ids and back. Text tokens come from a library; command tokens get ids around theirs.

    A subclass sets `name` to the name that it registers under, reads its files in `__init__`, and says how
    plain text is encoded and ids are decoded. `batch_bytes` is how much text `encode_batch` encodes fastest. Tokens
    that were added to the finished vocabulary (`ftk.tokenizers.grow`) are found here, before plain text is encoded.

    Args:
        special_tokens: the layout that was chosen, with its options; None: `plain`.
        vocab: text -> id, of the text tokens that a layout may name.
        spellings: id -> text, of the text tokens.
        command_tokens: the special tokens of a tokenizer that takes no layout; where two share an id, the later one
            is decoded.
        added: text -> id of tokens that were added to the vocabulary; None: those in the file beside it.

    Raises:
        UserError: a token that the layout takes from the vocabulary is not in it.
    """

    SOURCE: ClassVar[str] = "source"
    """Folder in that of a saved tokenizer, for `source`."""

    name: ClassVar[str]
    reads_white_space: ClassVar[bool] = False  # whether texts of white space alone have ids
    chat_template: str | None = None  # of jinja, as it stood in the files
    prompt_prefix: Sequence[int] = ()  # ids that stand in front of every text that a model continues
    batch_bytes: ClassVar[int] = 1 << 17  # more need new pages from the system for each batch: a fifth slower
    source: Tokenizer | None = None  # of what an encoder reads, where that has a vocabulary of its own

    def __init__(
        self,
        config: TokenizerConfig,
        special_tokens: Chosen | None = None,
        *,
        files: Sequence[VocabularyFile],
        num_text_tokens: int,
        vocab: Mapping[str, int] | None = None,
        spellings: Mapping[int, str] | None = None,
        command_tokens: Sequence[CommandToken] | None = None,
        added: Mapping[str, int] | None = None,
    ) -> None:
        text_offset = 0
        if command_tokens is None:
            special_tokens = special_tokens or Chosen(SPECIAL_TOKENS.get(PLAIN), None)
            layout = special_tokens.build(tokenizer=self.name, vocab=vocab or {})
            where = str(files[0].path) if files else self.name
            command_tokens, text_offset = number(layout, num_text_tokens=num_text_tokens, vocab=vocab, where=where)
        self.config = config
        self.special_tokens = special_tokens
        read: tuple[VocabularyFile, ...] = ()
        if added is None:
            added, read = {}, ()
            if files:
                added, of_added = read_added_tokens(files[0].path)
                self.chat_template, of_template = read_template(files[0].path)
                read = (*of_added, *of_template)
        self.files = (*files, *read)
        self.command_tokens = tuple(command_tokens)
        self.special = SpecialTokens.of(command_tokens)
        self.num_text_tokens = num_text_tokens
        self.text_offset = text_offset
        taken = max(text_offset + num_text_tokens, *(1 + token.id for token in command_tokens), 0)
        if added and min(added.values()) < taken:
            raise UserError(
                f"{self.files[-1].path}: its ids start at {min(added.values())}, but {taken} ids are taken; give the "
                f"`special_tokens` that the tokenizer had when it was grown"
            )
        self.vocab_size = max(taken, *(1 + id_ for id_ in added.values()), 0)
        self.added = AddedTokens(added, ignore_case=self.ignores_case())
        self._command_texts = {token.id: token.text for token in command_tokens} | {id_: t for t, id_ in added.items()}
        self._spellings = {**(spellings or {}), **self._command_texts}
        self._splitter = CommandTokenSplitter(command_tokens)

    @property
    def of_source(self) -> Tokenizer:
        """The tokenizer of what an encoder reads: `source`, or this one."""
        return self if self.source is None else self.source

    def __repr__(self) -> str:
        special = " ".join(f"{role}={self.token_text(id_)!r}" for role, id_ in self.special.roles.items())
        return f"<tokenizer {self.name}: {self.vocab_size} tokens, {special or 'none of them special'}>"

    def encode(self, text: str, command_tokens: bool = False) -> list[int]:
        """The ids of `text`.

        Nothing is added at the ends. Text of white space alone has no ids (as in the original) but where
        `reads_white_space` says so. Lone surrogates, which UTF-8 cannot write, count as U+FFFD.

        Args:
            command_tokens: whether the literal names of command tokens ("[MASK]") stand for the tokens, as in
                a prompt. If not, as in a corpus, they are letters like others and become no command tokens.
        """
        text = well_formed(text)
        if not self.reads_white_space and not text.strip():
            return []
        ids: list[int] = []
        for part in self._splitter.split(text) if command_tokens else (text,):
            if isinstance(part, CommandToken):
                ids.append(part.id)
                continue
            for piece in self.added.split(part):
                if isinstance(piece, int):
                    ids.append(piece)
                else:
                    ids += self._encode_behind(piece) if ids else self._encode_text(piece)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`[encode(text) for text in texts]`, faster: the library's threads share the work.

        With TOKENIZERS_PARALLELISM=false in the environment (worker processes), one thread does it.
        """
        return [row if isinstance(row, list) else memoryview(row).tolist() for row in self.encode_rows(texts)]

    def encode_rows(self, texts: Sequence[str]) -> Rows:
        """`encode_batch` in the form that the library makes fastest.

        Every row is a list, or every one is a buffer of int32, of which `np.asarray` makes an array.
        """
        if not all_plain(texts):
            skips = not self.reads_white_space
            texts = ["" if skips and text.isspace() else well_formed(text) for text in texts]
        apart = [i for i, text in enumerate(texts) if self.added.occur_in(text)] if self.added else []
        plain = list(texts)
        for i in apart:
            plain[i] = ""
        rows: Any = self._encode_rows(plain)
        for i in apart:
            row = self.encode(texts[i])
            rows[i] = row if isinstance(rows[i], list) else array("i", row)
        return rows

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """`[encode(text, command_tokens=True) for text in texts]`, as fast as the library can."""
        return [self.encode(text, command_tokens=True) for text in texts]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, command tokens by name. Ids without a text (vocabulary padding) are left out.

        Args:
            ids: ints, or a 1-D array or tensor of them.
        """

    def token_text(self, token_id: int) -> str:
        """How the vocabulary spells one id; "<unused 7>" where it has no token with that id."""
        return self._spellings.get(int(token_id), f"<unused {int(token_id)}>")

    def readable_token(self, token_id: int) -> str:
        """One id for a person: its text ("。" for "ãĢĤ"), or how the vocabulary spells it.

        The spelling stands where it shows more ("▁the", "##s", "<mask>"), or where the bytes are no whole character.

        Args:
            token_id: of the vocabulary, or not.
        """
        text, spelling = self.decode([token_id]), self.token_text(token_id)
        return spelling if text in spelling or "\ufffd" in text else text

    def token_bytes(self) -> TokenBytes:
        """What each token writes, for guides.

        Raises:
            UserError: the text of a token depends on its neighbours, or the tokenizer does not say.
        """
        raise UserError(
            f"guide: it is not known which bytes the tokens of the tokenizer {self.name} write; another one can be "
            "guided, or this one with a method 'token_bytes'"
        )

    @cached_property
    def partial_characters(self) -> Mapping[int, bytes]:
        """The bytes of each token that writes no whole characters; of none where it is not known what tokens write."""
        with contextlib.suppress(UserError):
            return {id_: own for id_, own in enumerate(self.token_bytes().of_ids) if not _is_text(own)}
        return {}

    def padded_vocab_size(self, multiple: int = 128) -> int:
        """The smallest multiple of `multiple` that holds the vocabulary: the number of embedding rows."""
        if multiple < 1:
            raise UserError(f"the vocabulary is padded to a multiple of {multiple}; it must be at least 1")
        return -(-self.vocab_size // multiple) * multiple

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of what decides the ids: name, options other than their defaults, file hashes; and `source`."""
        return self._digest([] if self.source is None else [self.source.fingerprint])

    @property
    def described(self) -> str:
        """What tells it from others, in messages."""
        return f"{self.name}, {self.vocab_size} tokens, fingerprint {self.fingerprint[:12]}"

    @property
    def own_fingerprint(self) -> str:
        """The fingerprint without `source`."""
        return self._digest([])

    def _digest(self, more: list[str]) -> str:
        files = [file.sha256 for file in self.files if file.decides_ids]
        content = [self.name, self._options(only_changed=True), files, *more]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Copy the vocabulary files into `folder`, with `ftk_tokenizer.json`; `load_tokenizer` reads it, and `source`.

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
        if self.source is not None:
            described["source"] = self.SOURCE
            self.source.save(Path(folder) / self.SOURCE)
        save_files(Path(folder), self.files, described)

    def saved_for(self, owner: object) -> Path:
        """A folder of its own with what `save` writes; it is removed with its owner."""
        made = tempfile.TemporaryDirectory(prefix="ftk-tokenizer-")
        weakref.finalize(owner, made.cleanup)
        self.save(made.name)
        return Path(made.name)

    def ignores_case(self) -> bool:
        """Whether upper case and lower case have the same ids."""
        return False

    def write_added(self, added: Mapping[str, int], folder: Path) -> Path:
        """Write further tokens, text -> id, into the folder of the saved tokenizer; returns its vocabulary there.

        Raises:
            UserError: it has no vocabulary file.
        """
        if not self.files:
            raise UserError(f"the tokenizer {self.name} has no vocabulary file, beside which added tokens are kept")
        write_added_tokens(folder, self.added.ids | dict(added))
        return folder / self.files[0].path.name

    def _options(self, only_changed: bool = False) -> dict[str, Any]:
        """Options of the tokenizer and of its layout, in one mapping, as `build_tokenizer` takes them."""
        values: dict[str, Any] = {}
        for config in (self.config, self.special_tokens and self.special_tokens.config):
            for f in dataclasses.fields(config) if config is not None else ():
                value = getattr(config, f.name)
                if f.name != "path" and not (only_changed and value == f.default):
                    values[f.name] = value
        name = self.special_tokens.name if self.special_tokens is not None else UNNAMED_SPECIAL_TOKENS
        return values if name == UNNAMED_SPECIAL_TOKENS else values | {"special_tokens": name}

    def _ids_without_text(self) -> set[int]:
        """Ids that write no text of their own: command tokens and the unknown token."""
        return {token.id for token in self.command_tokens} | {
            one for one in (self.special.unk, self.special.pad) if one is not None
        }

    @abstractmethod
    def _encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text; [] for ""."""

    def _encode_behind(self, text: str) -> list[int]:
        """Ids of ordinary text behind a command token or an added one."""
        return self._encode_text(text)

    def _encode_rows(self, texts: list[str]) -> Rows:
        """`_encode_texts`, perhaps as buffers that are no arrays."""
        return self._encode_texts(texts)

    @abstractmethod
    def _encode_texts(self, texts: list[str]) -> Rows:
        """`_encode_text` of each; either lists, or arrays [length] of int32."""


def _is_text(content: bytes) -> bool:
    return "\ufffd" not in content.decode(errors="replace")


def well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD: what UTF-8 can write."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class OwnSpecialTokens(Tokenizer):
    """A tokenizer whose special tokens are those of its files: `special_tokens` lays no others around it."""

    name = "hf"
    reads_white_space = True  # as `AutoTokenizer` does

    def _options(self, only_changed: bool = False) -> dict[str, Any]:
        return super()._options(only_changed) | ({} if only_changed else {"special_tokens": PLAIN})
