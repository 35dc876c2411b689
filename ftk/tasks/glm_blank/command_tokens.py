"""GLM's command tokens as data: a table per kind of tokenizer, as the published checkpoints number them.

Where two names share one id in the original, the first has `advance=0`. Source: THUDM/GLM,
data_utils/tokenization.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftk.config.options import option
from ftk.errors import UserError
from ftk.registry import register_special_tokens
from ftk.tokenizers.special_tokens import Layout, Row, SpecialTokens

_ROBERTA_TOKENS = ("<s>", "</s>", "<unk>", "<mask>")


@dataclass(kw_only=True)
class GLMTokensConfig:
    block_symbols: bool = option(True, "add <|startofpiece|> and <|endofpiece|>, which frame an answer")
    task_mask: bool = option(True, "add [gMASK] and [sMASK], the blanks of documents and sentences")
    decoder_mask: bool = option(False, "add [dBLOCK], which hides words inside answers")
    layout: str = option(
        "auto",
        "of sentencepiece, glm: command tokens after the pieces, generic: <pad> ... <MASK> before them; of gpt2_bpe, "
        "roberta: those of its vocabulary; auto: roberta if it has <s>, </s>, <unk>, <mask>, else gpt2 and glm",
        choices=("auto", "glm", "generic", "gpt2", "roberta"),
    )
    fix_command_token: bool = option(
        True, "give [gMASK] an id of its own; GLM-10B-Chinese gives it that of <|endofpiece|>"
    )
    sentinel_tokens: int = option(
        0, "of bert_wordpiece: number of pairs [MASK1] <|startofpiece1|>, ... to add", max=10**6, unit="pairs", min=0
    )

    def __post_init__(self) -> None:
        if self.layout == "glm":  # so older tokenizers were saved; options at their default are not in a fingerprint
            self.layout = "auto"

    def enabled(self) -> list[str]:
        """Which groups of command tokens exist: task_mask and decoder_mask come only with block_symbols."""
        if not self.block_symbols:
            return []
        return ["block_symbols", *(name for name in ("task_mask", "decoder_mask") if getattr(self, name))]


@register_special_tokens("glm", config=GLMTokensConfig)
def glm_layout(config: GLMTokensConfig, *, tokenizer: str, vocab: Mapping[str, int]) -> Layout:
    """The command tokens of a kind of tokenizer; of one that GLM was not published with, those of sentencepiece.

    Raises:
        UserError: an option is for another kind of tokenizer.
    """
    layouts = {"sentencepiece": ("generic",), "gpt2_bpe": ("gpt2", "roberta")}.get(tokenizer, ())
    if config.layout not in ("auto", *layouts):
        raise UserError(f"layout {config.layout} is not one of {tokenizer}, which has {', '.join(('auto', *layouts))}")
    if config.sentinel_tokens and tokenizer != "bert_wordpiece":
        raise UserError(f"sentinel_tokens is {config.sentinel_tokens}; only bert_wordpiece can have such pairs")
    layout = _table(config, tokenizer, vocab).with_options(config.enabled())
    return Layout(layout.first, layout.last + sentinel_rows(config.sentinel_tokens))


def sentinels(special: SpecialTokens) -> tuple[tuple[int, int], ...]:
    """(mask, start) ids of the blanks 1, 2 ..., of tokenizers with sentinel tokens; else ()."""
    roles = getattr(special, "roles", {})
    count = next(i for i in range(len(roles) + 1) if f"mask{i + 1}" not in roles)
    return tuple((roles[f"mask{i}"], roles[f"sop{i}"]) for i in range(1, count + 1))


def sentinel_rows(count: int) -> tuple[Row, ...]:
    """Rows of `count` pairs [MASK1] <|startofpiece1|> [MASK2] ...: one pair per blank."""
    return tuple(
        row
        for i in range(1, count + 1)
        for row in (Row(f"MASK{i}", f"[MASK{i}]"), Row(f"sop{i}", f"<|startofpiece{i}|>"))
    )


def _table(config: GLMTokensConfig, tokenizer: str, vocab: Mapping[str, int]) -> Layout:
    if tokenizer == "bert_wordpiece":
        return BERT_WORDPIECE
    if tokenizer == "gpt2_bpe":
        is_roberta = config.layout == "auto" and all(token in vocab for token in _ROBERTA_TOKENS)
        return ROBERTA_BPE if is_roberta or config.layout == "roberta" else GPT2_BPE
    if tokenizer == "fairseq_dict":
        return FAIRSEQ_WITH_MASK if "<mask>" in vocab else FAIRSEQ
    if config.layout == "generic":
        return SENTENCEPIECE_GENERIC
    return SENTENCEPIECE if config.fix_command_token else SENTENCEPIECE_UNFIXED


_ANSWERS = (Row("sop", "<|startofpiece|>", "block_symbols"), Row("eop", "<|endofpiece|>", "block_symbols"))
_GMASK, _SMASK = Row("gMASK", "[gMASK]", "task_mask", lstrip=True), Row("sMASK", "[sMASK]", "task_mask", lstrip=True)
_HIDDEN = Row("dBLOCK", "[dBLOCK]", "decoder_mask")
_ADDED = (*_ANSWERS, _GMASK, _SMASK, _HIDDEN)

BERT_WORDPIECE = Layout(last=(
    Row("pad", "[PAD]", in_vocab="[PAD]"),
    Row("ENC", "[CLS]", in_vocab="[CLS]", role="cls"),
    Row("MASK", "[MASK]", in_vocab="[MASK]"),
    Row("unk", "[UNK]", in_vocab="[UNK]"),
    Row("sep", "[SEP]", in_vocab="[SEP]"),
    Row("eos", "[PAD]", in_vocab="[PAD]"),
    *_ANSWERS,
    Row("gMASK", "[gMASK]", "task_mask"),
    Row("sMASK", "[sMASK]", "task_mask"),
    _HIDDEN,
))  # fmt: skip

GPT2_BPE = Layout(last=(
    Row("pad", "<|endoftext|>", in_vocab="<|endoftext|>"),
    Row("eos", "<|endoftext|>", in_vocab="<|endoftext|>"),
    *_ANSWERS,
    Row("ENC", "[CLS]", "block_symbols", role="cls"),
    Row("MASK", "[MASK]", "block_symbols", lstrip=True),
    Row("sep", "[SEP]", "block_symbols"),
    Row("unk", "[UNK]", "block_symbols"),
    _GMASK, _SMASK, _HIDDEN,
))  # fmt: skip

ROBERTA_BPE = Layout(last=(
    Row("pad", "<|endoftext|>", in_vocab="</s>"),
    Row("eos", "<|endoftext|>", in_vocab="</s>"),
    Row("sep", "[SEP]", in_vocab="</s>"),
    Row("ENC", "[CLS]", role="cls", in_vocab="<s>"),
    Row("MASK", "[MASK]", in_vocab="<mask>", lstrip=True),
    Row("unk", "[UNK]", in_vocab="<unk>"),
    *_ADDED,
))  # fmt: skip

# fairseq's four, and GLM's after the dictionary; <mask> is its own where the dictionary has one (BART, RoBERTa).
_FAIRSEQ_BASE = (
    Row("ENC", "<s>", role="cls", in_vocab="<s>"),
    Row("pad", "<pad>", in_vocab="<pad>"),
    Row("sep", "</s>", in_vocab="</s>"),
    Row("eos", "</s>", in_vocab="</s>"),
    Row("unk", "<unk>", in_vocab="<unk>"),
)
FAIRSEQ = Layout(last=(*_FAIRSEQ_BASE, Row("MASK", "<mask>", lstrip=True), *_ADDED))
FAIRSEQ_WITH_MASK = Layout(last=(*_FAIRSEQ_BASE, Row("MASK", "<mask>", lstrip=True, in_vocab="<mask>"), *_ADDED))

# One id between unk and sop stays unused, as in the original.
_SENTENCEPIECE_BASE = (
    Row("pad", "<|endoftext|>", advance=0),
    Row("eos", "<|endoftext|>"),
    Row("sep", "[SEP]"),
    Row("ENC", "[CLS]", role="cls"),
    Row("MASK", "[MASK]", lstrip=True),
    Row("unk", "[UNK]"),
    Row("sop", "<|startofpiece|>", "block_symbols", skip=1),
)

# 50000 pieces: GLM-Large-Chinese.
SENTENCEPIECE = Layout(last=(*_SENTENCEPIECE_BASE, _ANSWERS[1], _SMASK, _GMASK, _HIDDEN))

# 50000 pieces: GLM-10B-Chinese, whose gMASK has the id of eop (the original without --fix-command-token).
_EOP = Row("eop", "<|endofpiece|>", "block_symbols", advance=0)
SENTENCEPIECE_UNFIXED = Layout(last=(*_SENTENCEPIECE_BASE, _EOP, _GMASK, _SMASK, _HIDDEN))

# The original's default for any SentencePiece model: eight command tokens, then the pieces. The rows after
# the pieces are ftk's addition: without them the layout cannot carry the GLM objective.
SENTENCEPIECE_GENERIC = Layout(
    first=tuple(
        Row(name, f"<{name}>", role="cls" if name == "ENC" else "")
        for name in ("pad", "eos", "bos", "unk", "sep", "L2R", "ENC", "MASK")
    ),
    last=(
        Row("sop", "<sop>", "block_symbols"),
        Row("eop", "<eop>", "block_symbols"),
        Row("sMASK", "<sMASK>", "task_mask"),
        Row("gMASK", "<gMASK>", "task_mask"),
        Row("dBLOCK", "<dBLOCK>", "decoder_mask"),
    ),
)
