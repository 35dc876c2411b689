"""A SentencePiece tokenizer as the tokenizer.json of Hugging Face's library, which other programs read."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ftk.tokenizers.hf_files import TOKENIZER
from ftk.tokenizers.sentencepiece import SentencePieceTokenizer
from ftk.tokenizers.token_bytes import META

# Numbers of fields and values in SentencePiece's sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND, _MODEL_TYPE, _CHARACTERS_TO, _PREFIX, _FEW_SPACES = 1, 2, 3, 3, 2, 3, 4
_UNIGRAM, _BPE, _CHARACTERS = 1, 2, 4
_NORMAL, _UNKNOWN, _CONTROL, _DEFINED, _BYTE = 1, 2, 3, 4, 6

_NEVER = 10.0  # times the lowest score: of pieces that no text is cut into
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_SAMPLES = (
    "A few words, \u51e0\u4e2a\u5b57\uff0c123.\nx\u0301 \ufb01 \U0001f600  \uff21\uff22\t%s ",
    "  \u79e6\u5ddd\u96c4\u5e1d\u5b85\uff0c\u51fd\u8c37\u58ef\u7687\u5c45\u3002Don't stop; caf\u00e9 (2024)",
)


def json_files(tokenizer: SentencePieceTokenizer, around: tuple[Sequence[int], Sequence[int]]) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json, from which `transformers` takes the ids of a tokenizer.

    Unlike here, the name of a special token in a text always stands for the token there.

    Args:
        tokenizer: any.
        around: special tokens in front of and behind a text that the model reads.

    Returns:
        name -> content; empty where the library cannot give the same ids, as of models of whole words.
    """
    made = _library_tokenizer(tokenizer)
    if made is None:
        return {}
    before, behind = ([(tokenizer.token_text(id_), id_) for id_ in ids] for ids in around)
    if before or behind:
        single = [*(text for text, _ in before), "$A", *(text for text, _ in behind)]
        pair = [*single, "$B:1", *(f"{text}:1" for text, _ in behind)]
        made.post_processor = processors.TemplateProcessing(single, pair, [*before, *behind])
    ids = {role: getattr(tokenizer.special, role) for role in _ROLES}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": tokenizer.token_text(id_) for role, id_ in ids.items() if id_ is not None},
    }
    return {
        TOKENIZER: made.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, ensure_ascii=False, indent=2) + "\n").encode(),
    }


class _Piece(NamedTuple):
    text: str
    score: float
    kind: int


def _library_tokenizer(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer | None:
    """The same tokenizer by the library `tokenizers`; None if its ids or those of a sample would be others."""
    fields = _fields(tokenizer.model)
    pieces = [_piece(content) for number, content in fields if number == _PIECES]
    if any(piece.kind not in (_NORMAL, _UNKNOWN, _CONTROL, _DEFINED, _BYTE) for piece in pieces):
        return None
    shift, added = tokenizer.text_offset, tokenizer.added.ids
    special = {token.id: token.text for token in tokenizer.command_tokens}
    special |= {shift + id_: piece.text for id_, piece in enumerate(pieces) if piece.kind in (_UNKNOWN, _CONTROL)}
    named = special | {id_: text for text, id_ in added.items()}
    names = {id_: named.get(id_, f"<unused {id_}>") for id_ in range(tokenizer.vocab_size)}
    pieces = [*(_Piece(names[id_], 0.0, _CONTROL) for id_ in range(shift)), *pieces]
    model = _model(pieces, dict(_of_part(fields, _TRAINER)).get(_MODEL_TYPE, _UNIGRAM))
    if model is None:
        return None
    made = tokenizers.Tokenizer(model)
    _set_steps(made, pieces, dict(_of_part(fields, _NORMALIZER)))
    for id_ in sorted({*named, *range(len(pieces), tokenizer.vocab_size)}):
        text = names[id_]
        made.add_tokens([AddedToken(text, special=text not in added, normalized=False)])
        if made.token_to_id(text) != id_:
            return None
    defined = [f"a {piece.text * times} b" for piece in pieces if piece.kind == _DEFINED for times in (1, 2, 3, 5)]
    texts = (*_SAMPLES, *defined, "".join(defined))
    same = all(made.encode(text, add_special_tokens=False).ids == tokenizer.encode(text) for text in texts)
    return made if same else None


def _model(pieces: Sequence[_Piece], model_type: int) -> Any:
    """The library's model: the pieces with their scores, or the pairs that make them; None: another kind of model."""
    unknown = next(id_ for id_, piece in enumerate(pieces) if piece.kind == _UNKNOWN)
    falls_back = any(piece.kind == _BYTE for piece in pieces)
    if model_type == _UNIGRAM:
        never = _NEVER * min(-1.0, *(piece.score for piece in pieces))
        scores = [(piece.text, {_NORMAL: piece.score, _DEFINED: 0.0}.get(piece.kind, never)) for piece in pieces]
        return models.Unigram(scores, unknown, falls_back)
    if model_type not in (_BPE, _CHARACTERS):
        return None
    vocab = {piece.text: id_ for id_, piece in enumerate(pieces)}
    pairs = [*_pairs(pieces)] if model_type == _BPE else []
    made = models.BPE(vocab, pairs, unk_token=pieces[unknown].text, fuse_unk=True, byte_fallback=falls_back)
    if any(piece.kind == _DEFINED for piece in pieces):  # they are words of their own, which no pairs make
        if any(len(made.tokenize(piece.text)) > 1 for piece in pieces if piece.kind == _NORMAL):
            return None
        made.ignore_merges = True
    return made


def _pairs(pieces: Sequence[_Piece]) -> Iterator[tuple[str, str]]:
    """The pairs of pieces that make one, the best first."""
    texts = {piece.text for piece in pieces if piece.kind == _NORMAL}
    for text, _, kind in sorted(pieces, key=lambda piece: -piece.score):
        if kind == _NORMAL:
            cuts = ((text[:place], text[place:]) for place in range(1, len(text)))
            yield from (pair for pair in cuts if texts.issuperset(pair))


def _set_steps(made: tokenizers.Tokenizer, pieces: Sequence[_Piece], fields: Mapping[int, Any]) -> None:
    """What the library does before and after its model; `fields` are those of the normalizer."""
    steps: list[Any] = []
    if characters := fields.get(_CHARACTERS_TO):
        steps.append(normalizers.Precompiled(characters))
    if fields.get(_FEW_SPACES, True):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    has_prefix = bool(fields.get(_PREFIX, True))
    if has_prefix:
        steps.append(normalizers.Prepend(META))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", META)])
    texts = {piece.text for piece in pieces if piece.kind == _NORMAL}
    defined = sorted((piece.text for piece in pieces if piece.kind == _DEFINED), key=len, reverse=True)
    splits = [pre_tokenizers.Split(Regex("|".join(map(re.escape, defined))), "isolated")] if defined else []
    if META in texts and not any(META in text[1:] for text in texts):
        splits.append(pre_tokenizers.Split(META, "merged_with_next"))  # words, for speed
    if splits:
        made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    of_prefix = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(META, " "), decoders.ByteFallback(), decoders.Fuse(), *of_prefix]
    )


def _piece(content: bytes) -> _Piece:
    fields = dict(_fields(content))
    score = struct.unpack("<f", fields.get(_SCORE, bytes(4)))[0]
    return _Piece(fields.get(_TEXT, b"").decode(), score, fields.get(_KIND, _NORMAL))


def _of_part(fields: Sequence[tuple[int, Any]], part: int) -> Iterator[tuple[int, Any]]:
    """The fields of a message within a message, which may be written in several pieces."""
    for number, content in fields:
        if number == part:
            yield from _fields(content)


def _fields(content: bytes) -> list[tuple[int, Any]]:
    """(number, value) of the fields of a protocol buffer: whole numbers, else bytes."""
    found: list[tuple[int, Any]] = []
    at = 0

    def whole() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
            if byte < 0x80:
                return value

    while at < len(content):
        key = whole()
        if key & 7 == 0:
            found.append((key >> 3, whole()))
            continue
        size = {1: 8, 5: 4}.get(key & 7) or whole()
        found.append((key >> 3, content[at : at + size]))
        at += size
    return found
