"""Tokenizers in Hugging Face's format: `tokenizer.json` or the older vocabulary files, with the files beside them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from ftk.config import Chosen
from ftk.errors import UserError
from ftk.files import write_whole
from ftk.registry import register_tokenizer
from ftk.tokenizers.base import OwnSpecialTokens, TokenizerConfig, well_formed
from ftk.tokenizers.files import VocabularyFile, as_text, read_file
from ftk.tokenizers.hf_files import (
    BYTE_PAIRS,
    SENTENCE_PIECES,
    TOKENIZER,
    Companions,
    check_words,
    find_vocabulary,
    read_backend,
    read_companions,
    roles_of,
)
from ftk.tokenizers.special_tokens import PLAIN, CommandToken
from ftk.tokenizers.token_bytes import TokenBytes, library_bytes

if TYPE_CHECKING:
    from ftk.tokenizers.hf_sentencepiece import HuggingFaceSentencePiece

_BYTE = re.compile("<0x[0-9A-F]{2}>")  # as ByteFallback reads it
_BROKEN = re.compile("[\udc80-\udcff]")  # bytes that surrogateescape keeps


@register_tokenizer("hf", config=TokenizerConfig)
def hugging_face(
    config: TokenizerConfig, special_tokens: Chosen | None = None
) -> HuggingFaceTokenizer | HuggingFaceSentencePiece:
    """The tokenizer at a path: a folder of Hugging Face's, or a vocabulary in it.

    Raises:
        UserError: there is none, it is damaged, or a layout of special tokens is given.
    """
    if special_tokens is not None and special_tokens.name != PLAIN:
        raise UserError(f"`special_tokens` {special_tokens.name}: the tokenizer hf has those of its file, no others")
    path = find_vocabulary(Path(config.path))
    if not path.name.endswith(SENTENCE_PIECES):
        return HuggingFaceTokenizer(config, path)
    from ftk.tokenizers.hf_sentencepiece import HuggingFaceSentencePiece

    return HuggingFaceSentencePiece(config, path)


class HuggingFaceTokenizer(OwnSpecialTokens):
    """Any tokenizer that the `tokenizers` library runs: ids as `AutoTokenizer` gives them.

    Special tokens that are spelt out in a text stay text.

    Args:
        path: `tokenizer.json` or an older vocabulary.

    Raises:
        UserError: a file is missing, or is not one that the library reads.
    """

    def __init__(self, config: TokenizerConfig, path: Path) -> None:
        companions = read_companions(path)
        self._backend, files = _backend_of(path, companions)
        roles = roles_of(companions, lambda text: self._backend.token_to_id(text) is not None)
        vocab = self._backend.get_vocab(with_added_tokens=True)
        super().__init__(
            config,
            None,  # a layout would lay other tokens around those that the files have
            files=(*files, *companions.files),
            command_tokens=list(_command_tokens(self._backend, roles)),
            num_text_tokens=1 + max(vocab.values(), default=-1),
            added={},  # the library finds them
        )
        self.chat_template = companions.chat_template
        # What stands in front of every text, such as LLaMA's <s>: a model that learned so must be asked so.
        added, plain = (_call(path, self._backend.encode, "a", add_special_tokens=add).ids for add in (True, False))
        self.prompt_prefix = added[: added.index(plain[0])] if plain and plain[0] in added else []
        self._backend.encode_special_tokens = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {name: value for name, value in state.items() if name not in ("_prompts", "_letters")}
        self._backend.encode_special_tokens = True  # which the library forgets on the way to a worker process

    def encode(self, text: str, command_tokens: bool = False) -> list[int]:
        """As of `Tokenizer`; in a prompt the library finds special tokens, which decides about spaces behind them."""
        if not command_tokens:
            return super().encode(text)
        return _call(self.files[0].path, self._prompts.encode, well_formed(text), add_special_tokens=False).ids

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode_texts([*map(well_formed, texts)], self._prompts)

    def ignores_case(self) -> bool:
        return self._backend.normalizer is not None and self._backend.normalizer.normalize_str("A") == "a"

    def write_added(self, added: Mapping[str, int], folder: Path) -> Path:
        """Into `tokenizer.json`, which older vocabulary files become."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        for text, id_ in added.items():
            # In the text as it is, unless that differs from the normal form by case.
            backend.add_tokens([tokenizers.AddedToken(text, normalized=self.ignores_case())])
            if backend.token_to_id(text) != id_:
                raise UserError(f"{self.files[0].path}: the ids of its tokens have gaps; no token can be added to it")
        write_whole(folder / TOKENIZER, backend.to_str(pretty=True))
        return folder / TOKENIZER

    @cached_property
    def _prompts(self) -> tokenizers.Tokenizer:
        """The same that turns special tokens in a text into their ids."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        others = [token for token in self.command_tokens if token.text not in known]
        backend.add_special_tokens(
            [tokenizers.AddedToken(token.text, special=True, normalized=False, lstrip=token.lstrip) for token in others]
        )
        return backend

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(id_) for id_ in ids if 0 <= int(id_) < self.vocab_size]
        text, decoder = self._backend.decode(known, skip_special_tokens=False), self._backend.decoder
        if "\ufffd" not in text or decoder is None or b"ByteFallback" not in decoder.__getstate__():
            return text
        return decoded(decoder, [*filter(None, map(self._backend.id_to_token, known))])

    def token_text(self, token_id: int) -> str:
        text = self._backend.id_to_token(int(token_id)) if token_id >= 0 else None
        return f"<unused {int(token_id)}>" if text is None else text

    def token_bytes(self) -> TokenBytes:
        return library_bytes(self._backend, self.vocab_size, self._ids_without_text(), str(self.files[0].path))

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = _call(self.files[0].path, self._backend.encode, text, add_special_tokens=False).ids
        return ids if self._spelt.isdisjoint(ids) else self._encode_letters(text)

    def _encode_texts(self, texts: list[str], backend: tokenizers.Tokenizer | None = None) -> list[list[int]]:
        encode = (backend or self._backend).encode_batch_fast
        rows = [encoded.ids for encoded in _call(self.files[0].path, encode, texts, add_special_tokens=False)]
        if backend is not None or not self._spelt:
            return rows
        spelt = self._spelt
        return [
            ids if spelt.isdisjoint(ids) else self._encode_letters(text) for text, ids in zip(texts, rows, strict=True)
        ]

    @cached_property
    def _spelt(self) -> frozenset[int]:
        """Special tokens that the model itself may make of their spelling: they are pieces like others to Unigram.

        AutoTokenizer leaves them so; here HTML's `</s>` must not end a document. BPE makes pieces by merges alone.
        """
        if isinstance(self._backend.model, tokenizers.models.BPE):
            return frozenset()
        model = json.loads(self._backend.to_str())["model"]
        words = model["vocab"]
        ids = {*words.values()} if isinstance(words, dict) else {*range(len(words))}
        unknown = {self.special.unk, model.get("unk_id"), self._backend.token_to_id(model.get("unk_token") or "")}
        return frozenset(token.id for token in self.command_tokens if token.id in ids) - unknown

    @cached_property
    def _letters(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The same without the pieces that special tokens are; and its ids of added tokens -> theirs here."""
        content = json.loads(self._backend.to_str())
        model, hidden = content["model"], {*map(self.token_text, self._spelt)}
        words = model["vocab"]
        name = {text: f"\0\uffff{text}" for text in hidden}  # which no text has
        if isinstance(words, dict):
            model["vocab"] = {name.get(text, text): id_ for text, id_ in words.items()}
        else:
            model["vocab"] = [[name.get(text, text), score] for text, score in words]
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in hidden]
        content["post_processor"] = None
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
        backend.encode_special_tokens = True
        here = {token.content: id_ for id_, token in self._backend.get_added_tokens_decoder().items()}
        return backend, {id_: here[token.content] for id_, token in backend.get_added_tokens_decoder().items()}

    def _encode_letters(self, text: str) -> list[int]:
        backend, renumbered = self._letters
        ids = _call(self.files[0].path, backend.encode, text, add_special_tokens=False).ids
        return [renumbered.get(id_, id_) for id_ in ids]


def decoded(decoder: Any, tokens: Sequence[str]) -> str:
    """The text of tokens by a decoder with ByteFallback.

    That takes all characters of a run of bytes for broken where one is: text that was right would change with the next
    token. Here, as in SentencePiece, each byte that belongs to no character is one U+FFFD, and the characters stay.
    """
    texts: list[str] = []
    for is_byte, run in itertools.groupby(tokens, lambda token: _BYTE.fullmatch(token) is not None):
        if is_byte:
            raw = bytes(int(token[1:-1], 16) for token in run)
            texts.append(_BROKEN.sub("\ufffd", raw.decode("utf-8", "surrogateescape")))
        else:
            texts += run
    return str(decoder.decode(texts))


def _backend_of(path: Path, companions: Companions) -> tuple[tokenizers.Tokenizer, tuple[VocabularyFile, ...]]:
    """The library's tokenizer, and the vocabulary files that it was made of."""
    if path.suffix == ".json" and path.name != BYTE_PAIRS:
        check_words(path, companions)
        content, file = read_file(path)
        backend = _call(path, tokenizers.Tokenizer.from_str, as_text(content, path))
        files: tuple[VocabularyFile, ...] = (file,)
    else:
        backend, files = read_backend(path, companions)
    backend.no_truncation()
    backend.no_padding()
    return backend, files


def _call(path: Path, call: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Calls the library. Its errors come from the file, which may lack an unknown token, for example."""
    try:
        return call(*given, **options)
    except BaseException as error:  # the library raises Exception itself, and its panics are not even that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{path}: is not a tokenizer that the library tokenizers can use ({error!s:.120})") from error


def _command_tokens(backend: tokenizers.Tokenizer, roles: Mapping[str, str]) -> Iterator[CommandToken]:
    """The tokens that have a role, then the other special ones."""
    every: dict[int, Any] = backend.get_added_tokens_decoder()
    for role, text in roles.items():
        id_ = backend.token_to_id(text)
        if id_ is not None:
            yield CommandToken(role, text, id_, lstrip=id_ in every and every[id_].lstrip)
    for id_, added in sorted(every.items()):
        if added.special and added.content not in roles.values():
            yield CommandToken(added.content, added.content, id_, lstrip=added.lstrip)
