"""Tokenizers in Hugging Face's format: `tokenizer.json`; special tokens from `tokenizer_config.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from ftk.config import Chosen
from ftk.errors import UserError
from ftk.parsing import parse_json
from ftk.registry import register_tokenizer
from ftk.tokenizers.base import Tokenizer, TokenizerConfig
from ftk.tokenizers.files import VocabularyFile, as_text, read_file
from ftk.tokenizers.special_tokens import PLAIN, CommandToken

TOKENIZER = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")  # the roles of special tokens, the newer form first
_ENCODERS = (  # what `transformers` knows by the classes of BERT's and RoBERTa's tokenizers
    {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"},
)
_ROLES = ("bos", "eos", "pad", "unk", "mask", "cls", "sep")


@register_tokenizer("hf", config=TokenizerConfig)
class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` of any kind, run by the `tokenizers` library: ids as `AutoTokenizer` gives them.

    `path` is a folder that holds one, or the file. Special tokens that are spelt out in a text stay text.

    Raises:
        UserError: the file is missing, or is not one that the library reads.
    """

    name = "hf"

    def __init__(self, config: TokenizerConfig, special_tokens: Chosen | None = None) -> None:
        if special_tokens is not None and special_tokens.name != PLAIN:
            raise UserError(
                f"`special_tokens` {special_tokens.name}: the tokenizer hf has those of its file, no others"
            )
        path = Path(config.path)
        path = path / TOKENIZER if path.is_dir() else path
        content, file = read_file(path)
        self._backend = _call(path, tokenizers.Tokenizer.from_str, as_text(content, path))
        self._backend.no_truncation()
        self._backend.no_padding()
        beside = [read_file(path.with_name(name)) for name in _BESIDE if path.with_name(name).is_file()]
        roles: dict[str, str] = {}
        for text, other in beside:
            roles = _roles(text, other) | roles
        # Older published folders name no special tokens.
        for named in _ENCODERS:
            if self._backend.token_to_id(named["mask"]) is not None:
                roles = named | roles
        # GPT-2's name no end token: `transformers` knows it by the tokenizer's class.
        roles.setdefault("eos", "<|endoftext|>")
        command_tokens = list(_command_tokens(self._backend, roles))
        vocab = self._backend.get_vocab(with_added_tokens=True)
        super().__init__(
            config,
            None,  # a layout would lay other tokens around those that the file has
            files=(file, *(other for _, other in beside)),
            command_tokens=command_tokens,
            num_text_tokens=1 + max(vocab.values(), default=-1),
        )
        # What stands in front of every text, such as LLaMA's <s>: a model that learned so must be asked so.
        added, plain = (_call(path, self._backend.encode, "a", add_special_tokens=add).ids for add in (True, False))
        self.prompt_prefix = added[: added.index(plain[0])] if plain and plain[0] in added else []
        self._backend.encode_special_tokens = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self._backend.encode_special_tokens = True  # which the library forgets on the way to a worker process

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(id_) for id_ in ids if 0 <= int(id_) < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        text = self._backend.id_to_token(int(token_id)) if token_id >= 0 else None
        return f"<unused {int(token_id)}>" if text is None else text

    def _encode_text(self, text: str) -> list[int]:
        return _call(self.files[0].path, self._backend.encode, text, add_special_tokens=False).ids

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        found = _call(self.files[0].path, self._backend.encode_batch_fast, texts, add_special_tokens=False)
        return [encoded.ids for encoded in found]

    def _options(self, only_changed: bool = False) -> dict[str, Any]:
        return super()._options(only_changed) | ({} if only_changed else {"special_tokens": PLAIN})


def _call(path: Path, call: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Calls the library. Its errors come from the file, which may lack an unknown token, for example."""
    try:
        return call(*given, **options)
    except BaseException as error:  # the library raises Exception itself, and its panics are not even that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{path}: is not a tokenizer that `tokenizers` can use ({error!s:.120})") from error


def _roles(content: bytes, file: VocabularyFile) -> dict[str, str]:
    """Role -> text, of "eos_token": "</s>" or {"content": "</s>", ...}."""
    try:
        described = parse_json(as_text(content, file.path))
    except ValueError as error:
        raise UserError(f"{file.path}: {error}") from None
    found = {}
    for role in _ROLES if isinstance(described, dict) else ():
        token = described.get(f"{role}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            found[role] = text
    return found


def _command_tokens(backend: tokenizers.Tokenizer, roles: dict[str, str]) -> Iterator[CommandToken]:
    """The tokens that have a role, then the other special ones."""
    every: dict[int, Any] = backend.get_added_tokens_decoder()
    for role, text in roles.items():
        id_ = backend.token_to_id(text)
        if id_ is not None:
            yield CommandToken(role, text, id_, lstrip=id_ in every and every[id_].lstrip)
    for id_, added in sorted(every.items()):
        if added.special and added.content not in roles.values():
            yield CommandToken(added.content, added.content, id_, lstrip=added.lstrip)
