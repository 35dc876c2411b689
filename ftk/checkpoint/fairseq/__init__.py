"""The form `fairseq` of checkpoints with its options, registered here without importing torch: see `reader`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ftk.config.options import option
from ftk.registry import register_converter

MODELS = ("transformer", "bart", "roberta", "transformer_lm")
"""Models of fairseq whose checkpoints are read, as they are registered there."""


@dataclass(kw_only=True)
class FairseqConfig:
    is_written: ClassVar[bool] = False

    fairseq_model: str | None = option(
        None, "`from`: of an architecture of your own, the model of fairseq that it is a size of", choices=MODELS
    )
    dictionaries: str | None = option(
        None,
        "`from`: folder with dict.txt, or the dict.LANGUAGE.txt of both sides; that of the checkpoint if not given",
        path=True,
    )
    dictionary_pieces: str | None = option(
        None,
        "`from`: what the dictionary's symbols are: words, or pieces of subword-nmt (@@) or SentencePiece; what the "
        "checkpoint records if not given, else words",
        choices=("words", "subword_nmt", "sentencepiece"),
    )


register_converter("fairseq", config=FairseqConfig)("ftk.checkpoint.fairseq.reader:Fairseq")
