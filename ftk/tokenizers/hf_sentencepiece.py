"""Hugging Face's folders with a SentencePiece model alone: T5's, mT5's, LLaMA's, Mistral's.

The sentencepiece library gives the ids, as it did when these models were trained. Around it stands what the classes of
`transformers` add: sentinels, added tokens, a token in front of a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftk.errors import UserError
from ftk.tokenizers.base import OwnSpecialTokens, TokenizerConfig
from ftk.tokenizers.files import read_file
from ftk.tokenizers.hf_files import Companions, check_class, read_companions, write_listed
from ftk.tokenizers.sentencepiece import SentencePieceTokenizer, load_model, role_pieces
from ftk.tokenizers.special_tokens import CommandToken

_SENTINELS = 100  # of T5's class, where the files name no number
_MAX_SENTINELS = 10**6
# A field of SentencePiece's protocol buffer, `normalizer_spec { add_dummy_prefix: false }`: appended to a message, it
# replaces the one there.
_NO_PREFIX = bytes((0x1A, 0x02, 0x18, 0x00))


class HuggingFaceSentencePiece(OwnSpecialTokens, SentencePieceTokenizer):
    """A SentencePiece model with the tokens of its folder: T5's has 100 sentinels behind its pieces, LLaMA's none.

    Raises:
        UserError: a file is damaged, or of a class whose ids are not the model's own.
    """

    def __init__(self, config: TokenizerConfig, path: Path) -> None:
        companions = read_companions(path)
        check_class(path, companions)
        content, file = read_file(path)
        self._processor = load_model(content, path)
        size, pieces = self._processor.get_piece_size(), role_pieces(self._processor)
        _check_roles(path, companions, pieces)
        tokens, added = _numbered(path, companions, self._processor)
        super(SentencePieceTokenizer, self).__init__(
            config,
            None,
            files=(file, *companions.files),
            command_tokens=tokens,
            num_text_tokens=size,
            added=added,
        )
        self.chat_template = companions.chat_template
        begins = companions.config.get("add_bos_token") is not False and self.special.bos is not None
        self.prompt_prefix = [self.special.bos] if begins else []  # type: ignore[list-item]
        # Without `legacy`, only the start of a text gets a space in front, not what follows a special token.
        bare = content + _NO_PREFIX
        if companions.config.get("add_prefix_space") is False:
            self._processor = load_model(bare, path)
        legacy = companions.config.get("legacy", _is_t5(pieces))
        self._behind = self._processor if legacy else load_model(bare, path)

    def write_added(self, added: Mapping[str, int], folder: Path) -> Path:
        """Into tokenizer_config.json, if it lists the added tokens, or the older added_tokens.json."""
        write_listed(added, folder)
        return folder / self.files[0].path.name

    def _encode_behind(self, text: str) -> list[int]:
        return self._behind.encode(text)


def _is_t5(pieces: dict[str, tuple[str, int]]) -> bool:
    """Whether the ids are those of T5's models: no token for the start of a text, padding in front."""
    return "bos" not in pieces and pieces.get("pad", ("", 1))[1] == 0


def _check_roles(path: Path, companions: Companions, pieces: dict[str, tuple[str, int]]) -> None:
    """Refuses models that neither the files nor their own ids say to be T5's or LLaMA's."""
    of_llama = {role: id_ for role, (_, id_) in pieces.items() if role != "pad"} == {"unk": 0, "bos": 1, "eos": 2}
    if (
        not companions.config.get("tokenizer_class")
        and not _is_t5(pieces)
        and (path.name != "tokenizer.model" or not of_llama)
    ):
        raise UserError(
            f"{path}: tokenizer_config.json names no 'tokenizer_class', and the model is numbered as neither T5's nor "
            f"LLaMA's; if its ids are those of the pieces, `tokenizer` sentencepiece reads it"
        )


def _numbered(path: Path, companions: Companions, processor: Any) -> tuple[list[CommandToken], dict[str, int]]:
    """The special tokens with their ids, those with a role first; and the other tokens behind the pieces."""
    size, pieces = processor.get_piece_size(), role_pieces(processor)
    roles = {role: text for role, (text, _) in pieces.items()} | dict(companions.roles)
    ids: dict[str, int] = {}
    sentinels = companions.config.get("extra_ids", _SENTINELS if _is_t5(pieces) else 0)
    if type(sentinels) is not int or not 0 <= sentinels <= _MAX_SENTINELS:
        raise UserError(f"{path.with_name('tokenizer_config.json')}: extra_ids is {sentinels!r:.40}; a number is meant")
    for number in range(sentinels):
        ids[f"<extra_id_{number}>"] = size + sentinels - 1 - number
    special = dict.fromkeys([*ids, *roles.values(), *companions.special])
    for text, token in sorted(companions.added.items(), key=lambda item: item[1].id):
        known = ids.get(text, _id_of_piece(processor, text))
        if known != token.id and (known is not None or token.id < size):
            raise UserError(
                f"{path}: the files next to it map {text!r:.60} to the id {token.id}, but this model has another; "
                f"do the files belong together?"
            )
        ids[text] = token.id
        if token.special:
            special[text] = None
    for text in special:
        if text not in ids:
            piece = _id_of_piece(processor, text)
            ids[text] = max(size - 1, *ids.values()) + 1 if piece is None else piece
    first = [CommandToken(role, text, ids[text]) for role, text in roles.items()]
    others = [text for text in special if text not in roles.values()]
    tokens = [*first, *(CommandToken(text, text, ids[text]) for text in others)]
    return tokens, {text: ids[text] for text in companions.added if text not in special and ids[text] >= size}


def _id_of_piece(processor: Any, text: str) -> int | None:
    """The id of the piece that is spelt so; None: there is none."""
    id_: int = processor.piece_to_id(text)
    return id_ if processor.id_to_piece(id_) == text else None
