"""Command tokens as data: one table per tokenizer family, as the published GLM checkpoints number them.

A table is read from top to bottom with a counter that starts at the size of the text vocabulary. A row either
takes the id of a token of the vocabulary (`in_vocab`) or the counter's value, which then moves on. Where two
names share one id in the original, the counter stands still (`advance=0`). Source: THUDM/GLM,
data_utils/tokenization.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftk.errors import UserError


@dataclass(frozen=True)
class CommandToken:
    """A token that steers the model instead of standing for text.

    Attributes:
        name: the original's name, e.g. "MASK", "ENC" (elsewhere called cls), "sop".
        text: how it is written in prompts, e.g. "[MASK]".
        id: its id.
        lstrip: whether it swallows the white space on its left.
    """

    name: str
    text: str
    id: int
    lstrip: bool = False


@dataclass(frozen=True)
class Row:
    """One row of a table; `needs` names the option without which the token does not exist."""

    name: str
    text: str
    needs: str = ""
    lstrip: bool = False
    in_vocab: str = ""
    skip: int = 0
    advance: int = 1


@dataclass(frozen=True)
class Layout:
    """Command tokens in front of the text tokens (ids from 0, the text is shifted) and behind them."""

    first: tuple[Row, ...] = ()
    last: tuple[Row, ...] = ()


BERT_WORDPIECE = Layout(last=(
    Row("pad", "[PAD]", in_vocab="[PAD]"),
    Row("ENC", "[CLS]", in_vocab="[CLS]"),
    Row("MASK", "[MASK]", in_vocab="[MASK]"),
    Row("unk", "[UNK]", in_vocab="[UNK]"),
    Row("sep", "[SEP]", in_vocab="[SEP]"),
    Row("eos", "[PAD]", in_vocab="[PAD]"),
    Row("sop", "<|startofpiece|>", "block_symbols"),
    Row("eop", "<|endofpiece|>", "block_symbols"),
    Row("gMASK", "[gMASK]", "task_mask"),
    Row("sMASK", "[sMASK]", "task_mask"),
    Row("dBLOCK", "[dBLOCK]", "decoder_mask"),
))  # fmt: skip

GPT2_BPE = Layout(last=(
    Row("pad", "<|endoftext|>", in_vocab="<|endoftext|>"),
    Row("eos", "<|endoftext|>", in_vocab="<|endoftext|>"),
    Row("sop", "<|startofpiece|>", "block_symbols"),
    Row("eop", "<|endofpiece|>", "block_symbols"),
    Row("ENC", "[CLS]", "block_symbols"),
    Row("MASK", "[MASK]", "block_symbols", lstrip=True),
    Row("sep", "[SEP]", "block_symbols"),
    Row("unk", "[UNK]", "block_symbols"),
    Row("gMASK", "[gMASK]", "task_mask", lstrip=True),
    Row("sMASK", "[sMASK]", "task_mask", lstrip=True),
    Row("dBLOCK", "[dBLOCK]", "decoder_mask"),
))  # fmt: skip

ROBERTA_BPE = Layout(last=(
    Row("pad", "<|endoftext|>", in_vocab="</s>"),
    Row("eos", "<|endoftext|>", in_vocab="</s>"),
    Row("sep", "[SEP]", in_vocab="</s>"),
    Row("ENC", "[CLS]", in_vocab="<s>"),
    Row("MASK", "[MASK]", in_vocab="<mask>", lstrip=True),
    Row("unk", "[UNK]", in_vocab="<unk>"),
    Row("sop", "<|startofpiece|>", "block_symbols"),
    Row("eop", "<|endofpiece|>", "block_symbols"),
    Row("gMASK", "[gMASK]", "task_mask", lstrip=True),
    Row("sMASK", "[sMASK]", "task_mask", lstrip=True),
    Row("dBLOCK", "[dBLOCK]", "decoder_mask"),
))  # fmt: skip

# fairseq's four, and GLM's behind the dictionary; <mask> is its own where the dictionary has one (BART, RoBERTa).
_FAIRSEQ_BASE = (
    Row("ENC", "<s>", in_vocab="<s>"),
    Row("pad", "<pad>", in_vocab="<pad>"),
    Row("sep", "</s>", in_vocab="</s>"),
    Row("eos", "</s>", in_vocab="</s>"),
    Row("unk", "<unk>", in_vocab="<unk>"),
)
_FAIRSEQ_ADDED = (
    Row("sop", "<|startofpiece|>", "block_symbols"),
    Row("eop", "<|endofpiece|>", "block_symbols"),
    Row("gMASK", "[gMASK]", "task_mask", lstrip=True),
    Row("sMASK", "[sMASK]", "task_mask", lstrip=True),
    Row("dBLOCK", "[dBLOCK]", "decoder_mask"),
)
FAIRSEQ = Layout(last=(*_FAIRSEQ_BASE, Row("MASK", "<mask>", lstrip=True), *_FAIRSEQ_ADDED))
FAIRSEQ_WITH_MASK = Layout(
    last=(*_FAIRSEQ_BASE, Row("MASK", "<mask>", lstrip=True, in_vocab="<mask>"), *_FAIRSEQ_ADDED)
)

_SENTENCEPIECE_BASE = (
    Row("pad", "<|endoftext|>", advance=0),
    Row("eos", "<|endoftext|>"),
    Row("sep", "[SEP]"),
    Row("ENC", "[CLS]"),
    Row("MASK", "[MASK]", lstrip=True),
    Row("unk", "[UNK]"),
)

# 50000 pieces: GLM-Large-Chinese. One id between unk and sop stays unused, as in the original.
SENTENCEPIECE = Layout(last=(
    *_SENTENCEPIECE_BASE,
    Row("sop", "<|startofpiece|>", "block_symbols", skip=1),
    Row("eop", "<|endofpiece|>", "block_symbols"),
    Row("sMASK", "[sMASK]", "task_mask", lstrip=True),
    Row("gMASK", "[gMASK]", "task_mask", lstrip=True),
    Row("dBLOCK", "[dBLOCK]", "decoder_mask"),
))  # fmt: skip

# 50000 pieces: GLM-10B-Chinese, whose gMASK has the id of eop (the original without --fix-command-token).
SENTENCEPIECE_UNFIXED = Layout(last=(
    *_SENTENCEPIECE_BASE,
    Row("sop", "<|startofpiece|>", "block_symbols", skip=1),
    Row("eop", "<|endofpiece|>", "block_symbols", advance=0),
    Row("gMASK", "[gMASK]", "task_mask", lstrip=True),
    Row("sMASK", "[sMASK]", "task_mask", lstrip=True),
    Row("dBLOCK", "[dBLOCK]", "decoder_mask"),
))  # fmt: skip

# The original's default for any SentencePiece model: eight command tokens, then the pieces. The rows behind
# the pieces are ftk's addition: without them the layout cannot carry the GLM objective.
SENTENCEPIECE_GENERIC = Layout(
    first=tuple(Row(name, f"<{name}>") for name in ("pad", "eos", "bos", "unk", "sep", "L2R", "ENC", "MASK")),
    last=(
        Row("sop", "<sop>", "block_symbols"),
        Row("eop", "<eop>", "block_symbols"),
        Row("sMASK", "<sMASK>", "task_mask"),
        Row("gMASK", "<gMASK>", "task_mask"),
        Row("dBLOCK", "<dBLOCK>", "decoder_mask"),
    ),
)


def sentinel_rows(count: int) -> tuple[Row, ...]:
    """Rows of `count` pairs [MASK1] <|startofpiece1|> [MASK2] ...: one pair a blank (BERT tokenizer only)."""
    return tuple(
        row
        for i in range(1, count + 1)
        for row in (Row(f"MASK{i}", f"[MASK{i}]"), Row(f"sop{i}", f"<|startofpiece{i}|>"))
    )


def number(
    layout: Layout,
    *,
    num_text_tokens: int,
    vocab: Mapping[str, int] | None = None,
    enabled: Sequence[str] = (),
    where: str = "the vocabulary",
) -> tuple[list[CommandToken], int]:
    """Give every command token of a layout its id.

    Args:
        layout: the family's table.
        num_text_tokens: size of the text vocabulary.
        vocab: text -> id, for the rows that stand in the vocabulary.
        enabled: options that are on, of "block_symbols", "task_mask", "decoder_mask".
        where: file of the vocabulary, for messages.

    Returns:
        the command tokens in the table's order, and by how much the text tokens are shifted.

    Raises:
        UserError: a token that must stand in the vocabulary does not.
    """
    vocab = vocab or {}
    missing = [row.in_vocab for row in layout.last if row.in_vocab and row.in_vocab not in vocab]
    if missing:
        raise UserError(
            f"{where}: holds no {', '.join(dict.fromkeys(missing))}; "
            "is this the vocabulary of another kind of tokenizer?"
        )
    tokens: list[CommandToken] = []
    for rows, start in ((layout.first, 0), (layout.last, len(layout.first) + num_text_tokens)):
        counter = start
        for row in rows:
            if row.needs and row.needs not in enabled:
                continue
            if row.in_vocab:
                tokens.append(CommandToken(row.name, row.text, vocab[row.in_vocab], row.lstrip))
                continue
            counter += row.skip
            tokens.append(CommandToken(row.name, row.text, counter, row.lstrip))
            counter += row.advance
    return tokens, len(layout.first)


class CommandTokenSplitter:
    """Finds the command tokens that stand in a text under their literal names.

    The original splits the text on one token after the other. No name holds another or overlaps with it (each
    has its only opening bracket at its start), so that one pass over all names finds the same.
    """

    def __init__(self, tokens: Sequence[CommandToken]) -> None:
        self._by_text = {token.text: token for token in tokens}
        longest_first = sorted(self._by_text, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def split(self, text: str) -> Iterator[str | CommandToken]:
        """The text's parts in order: pieces of ordinary text (never empty) and command tokens."""
        start = 0
        for match in self._pattern.finditer(text):
            token = self._by_text[match.group()]
            before = text[start : match.start()]
            if token.lstrip:
                before = before.rstrip()
            if before:
                yield before
            yield token
            start = match.end()
        if start < len(text):
            yield text[start:]
