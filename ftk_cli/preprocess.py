"""ftk-preprocess: turns text into the data folder that ftk-train reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftk.config import Chosen, compose, section, slot
from ftk.data.text.preprocess_config import DocumentConfig, InputConfig, OutputConfig, TrainingConfig
from ftk.errors import UserError
from ftk.registry import SPECIAL_TOKENS, TOKENIZERS
from ftk_cli.command import run, value_of

if TYPE_CHECKING:
    from ftk.tokenizers import Tokenizer

DESCRIPTION = """Encodes text and writes a data folder: one document per line (or JSONL, paragraphs, files).
Example: ftk-preprocess --trainpref train.txt --validpref valid.txt --destdir data-bin --vocab-size 8000"""


HELP = "layout of special tokens; if not given, that of a saved tokenizer, else plain, to which a task adds its own"


@dataclass(kw_only=True)
class PreprocessConfig:
    input: InputConfig = section("input")
    documents: DocumentConfig = section("documents")
    output: OutputConfig = section("output")
    training: TrainingConfig = section("training a SentencePiece model")
    tokenizer: Chosen = slot(TOKENIZERS, flag="--tokenizer", default="sentencepiece")
    special_tokens: Chosen = slot(SPECIAL_TOKENS, flag="--special-tokens", default="plain", help=HELP)


def main(argv: Sequence[str] | None = None) -> int:
    return run("ftk-preprocess", body, argv)


def body(argv: list[str]) -> int:
    config = compose(PreprocessConfig, "ftk-preprocess", DESCRIPTION, _with_path(argv))
    chosen, training = config.tokenizer, config.training
    train = chosen.name == "sentencepiece" and not chosen.config.path
    if train and config.input.shard is not None:
        raise UserError(
            "--shard encodes a part of the text, and training a tokenizer needs all of it: train one first, without "
            "--shard (--train-lines bounds the time), and give --tokenizer-path DESTDIR/tokenizer to every shard"
        )
    if train and training.vocab_size is None:
        raise UserError("give --tokenizer-path (a vocabulary), or --vocab-size to train one on --trainpref")
    if not train and training.vocab_size is not None:
        raise UserError(
            "--vocab-size is for training a SentencePiece model, --tokenizer-path names an existing one; "
            "leave out one of the two"
        )

    from ftk.data.text.preprocess import preprocess

    def make_tokenizer(path: Path | None) -> Tokenizer:
        options = chosen.config if path is None else dataclasses.replace(chosen.config, path=str(path))
        return tokenizer_of(dataclasses.replace(chosen, config=options), config.special_tokens, argv)

    print(preprocess(config.input, config.output, make_tokenizer, training if train else None, config.documents))
    return 0


def tokenizer_of(chosen: Chosen, special_tokens: Chosen, argv: Sequence[str]) -> Tokenizer:
    """The tokenizer; its special tokens are those that its folder was saved with, unless --special-tokens is given."""
    from ftk.tokenizers.build import saved_special_tokens

    if value_of(argv, "--special-tokens") is None:
        special_tokens = saved_special_tokens(chosen.config.path) or special_tokens
    return chosen.build(special_tokens=special_tokens)


def _with_path(argv: list[str]) -> list[str]:
    """The arguments with an empty --tokenizer-path, where none is given and a model will be trained."""
    trains = value_of(argv, "--tokenizer") in (None, "sentencepiece") and value_of(argv, "--tokenizer-path") is None
    return [*argv, "--tokenizer-path="] if trains else argv


if __name__ == "__main__":
    raise SystemExit(main())
