"""SentencePiece models, with special tokens around any number of pieces."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import sentencepiece

from ftk.config import Chosen
from ftk.errors import UserError
from ftk.registry import register_tokenizer
from ftk.tokenizers.base import Rows, Tokenizer, TokenizerConfig
from ftk.tokenizers.files import find_file, read_file
from ftk.tokenizers.token_bytes import MAYBE_SPACE, TokenBytes, spelled_with_meta

_SAMPLE = "A few words, \u51e0\u4e2a\u5b57, 123"
_AS_USUAL = (False, -1, 0.1, False, False, False)  # no sampling, whose two numbers are not used; no <s>, </s>, order


@register_tokenizer("sentencepiece", config=TokenizerConfig)
class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model (Kudo and Richardson 2018), trained by `train_sentencepiece` or by others.

    The model's own control pieces (<s>, </s>) are never made from text.
    `path` is a .model file, or a folder that holds exactly one.

    Raises:
        UserError: the file is missing or is not a SentencePiece model.
    """

    name = "sentencepiece"
    batch_bytes = 1 << 18  # the library starts a thread for each batch

    def __init__(self, config: TokenizerConfig, special_tokens: Chosen | None = None) -> None:
        path = find_file(Path(config.path), ".model", "a SentencePiece model")
        content, file = read_file(path)
        self._processor = load_model(content, path)
        num_pieces = self._processor.get_piece_size()
        vocab = dict(role_pieces(self._processor).values())
        super().__init__(config, special_tokens, files=(file,), num_text_tokens=num_pieces, vocab=vocab)

    @property
    def model(self) -> bytes:
        """The SentencePiece model, as in its file."""
        content: bytes = self._processor.serialized_model_proto()
        return content

    def decode(self, ids: Iterable[int]) -> str:
        """Each run of pieces is decoded by itself; command tokens are put between them without spaces."""
        parts: list[str] = []
        pieces: list[int] = []
        for id_ in map(int, ids):
            if id_ in self._command_texts:
                parts += [self._decode_pieces(pieces), self._command_texts[id_]]
                pieces = []
            elif 0 <= id_ - self.text_offset < self.num_text_tokens:
                pieces.append(id_ - self.text_offset)
        parts.append(self._decode_pieces(pieces))
        return "".join(parts)

    def token_text(self, token_id: int) -> str:
        piece = int(token_id) - self.text_offset
        if int(token_id) in self._command_texts:
            return self._command_texts[int(token_id)]
        if 0 <= piece < self.num_text_tokens:
            return self._processor.id_to_piece(piece)
        return f"<unused {int(token_id)}>"

    def token_bytes(self) -> TokenBytes:
        found = [b""] * self.vocab_size
        processor = self._processor
        # Behind an added token the library would drop a space, so that none is used.
        without = self._ids_without_text() | {*self._command_texts}
        for piece in range(self.num_text_tokens):
            has_none = processor.is_control(piece) or processor.is_unknown(piece) or processor.is_unused(piece)
            if not has_none and piece + self.text_offset not in without:
                written = spelled_with_meta(processor.id_to_piece(piece), bytes_too=processor.is_byte(piece))
                # At the start of a text a space as a byte stays, a space as a piece does not.
                found[piece + self.text_offset] = b"" if written == b" " and processor.is_byte(piece) else written
        return TokenBytes(found, MAYBE_SPACE)

    def _decode_pieces(self, pieces: list[int]) -> str:
        return self._processor.decode(pieces) if pieces else ""

    def _encode_text(self, text: str) -> list[int]:
        return [id_ + self.text_offset for id_ in self._processor.encode(text)]

    def _encode_texts(self, texts: list[str]) -> Rows:
        if not texts:
            return []
        # Arrays, not lists: making an object of each id took a fifth of the time.
        rows = self._processor.encode(texts, num_threads=_num_threads(len(texts)), return_type="numpy")
        return [row + self.text_offset for row in rows] if self.text_offset else rows

    def _encode_rows(self, texts: list[str]) -> Rows:
        """The library's own buffers, without the array that it makes of each: a fifth of the time for short texts."""
        is_own = type(self)._encode_texts is SentencePieceTokenizer._encode_texts
        if not texts or not is_own or self.text_offset or not self._has_buffers:
            return self._encode_texts(texts)
        return self._buffers(texts)

    @cached_property
    def _has_buffers(self) -> bool:
        """Whether this version of the library gives its buffers as it is asked for them here."""
        try:
            ids = memoryview(self._buffers([_SAMPLE])[0]).tolist()
        except (AttributeError, IndexError, TypeError):
            return False
        return bool(ids == self._processor.encode(_SAMPLE))

    def _buffers(self, texts: list[str]) -> list[Any]:
        processor: Any = self._processor
        inside = processor._processor._EncodeAsBufferBatch
        return list(inside(texts, _num_threads(len(texts)), None, *_AS_USUAL))


def load_model(content: bytes, path: Path) -> sentencepiece.SentencePieceProcessor:
    """A model from the content of its file.

    Raises:
        UserError: it is none, or a damaged one.
    """
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
        # A damaged model may load and fail later: all pieces must be UTF-8.
        processor.id_to_piece(list(range(processor.get_piece_size())))
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{path}: not a SentencePiece model, or a damaged one") from error
    if processor.get_piece_size() < 1:
        raise UserError(f"{path}: is a SentencePiece model without pieces")
    return processor


def role_pieces(processor: sentencepiece.SentencePieceProcessor) -> dict[str, tuple[str, int]]:
    """Role -> (spelling, id) of the model's own beginning, end, padding and unknown piece, of those that it has."""
    ids = {"bos": processor.bos_id(), "eos": processor.eos_id(), "pad": processor.pad_id(), "unk": processor.unk_id()}
    return {role: (processor.id_to_piece(id_), id_) for role, id_ in ids.items() if id_ >= 0}


def _num_threads(num_texts: int) -> int:
    """One in worker processes, which say so in the variable that the `tokenizers` library also heeds."""
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("0", "false", "no", "off"):
        return 1
    return max(1, min(num_texts, os.cpu_count() or 1))
