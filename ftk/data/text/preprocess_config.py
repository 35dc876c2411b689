"""Options of ftk-preprocess."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option, required
from ftk.data.text.blocks import MAX_DOCUMENT_BYTES
from ftk.data.text.paths import FORMATS, SEPARATORS

MAX_SHARDS = 100_000
NORMAL_FORMS = ("none", "nfc", "nfkc")


@dataclass(kw_only=True)
class TextConfig:
    """How documents are read from files, by ftk-preprocess and by `dataset` raw."""

    document_separator: str = option(
        "line", "in text, a document is a line, ends at a blank line, or is a file", choices=SEPARATORS
    )
    text_key: str = option("text", "field of each JSON object, or column of a table, that holds the text", daily=True)
    max_document_bytes: int = option(
        MAX_DOCUMENT_BYTES, "a longer document counts as one that cannot be read", unit="bytes", min=1
    )
    on_error: str = option(
        "raise",
        "stop at the first document that cannot be read, or skip such documents and count them",
        choices=("raise", "skip"),
    )

    def validate(self) -> Iterator[str]:
        if not self.text_key:
            yield "text_key is empty; it must name a field"


@dataclass(frozen=True)
class Shard:
    """One of several parts of the inputs: `number` from 1 to `count`."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(kw_only=True)
class InputConfig(TextConfig):
    trainpref: str | None = option(
        None,
        "training text: files, folders or patterns; .gz, .bz2, .xz and .zst are unpacked",
        daily=True,
        metavar="F[,F...]",
        path=True,
    )
    validpref: str | None = option(None, "validation text", daily=True, metavar="F[,F...]", path=True)
    testpref: str | None = option(None, "test text", metavar="F[,F...]", path=True)
    valid_ratio: float = option(
        0.0, "share of trainpref's documents held out for valid, chosen by a hash of their text", "[0, 1)", daily=True
    )
    test_ratio: float = option(0.0, "the same for test", "[0, 1)")
    format: str = option(
        "auto",
        "auto takes .jsonl, .ndjson and .json for JSONL, .parquet and .arrow for tables, others for text",
        choices=FORMATS,
    )

    shard: str | None = option(
        None,
        "encode part I of N of the inputs alone, cut by bytes, as one of N machines; `ftk-data merge` joins the N "
        "folders",
        metavar="I/N",
    )
    source_lang: str | None = option(
        None,
        "read pairs, as of a translation: each PREF stands for the lines of PREF.SOURCE_LANG and PREF.TARGET_LANG, or "
        "is JSONL with fields of these names",
        metavar="NAME",
    )
    target_lang: str | None = option(None, "the other of them, which the model learns to write", metavar="NAME")
    source_tokenizer_path: str | None = option(
        None,
        "vocabulary of the sources, where it is not that of the targets; of the same kind",
        needs={"source_lang": True},
        metavar="PATH",
        path=True,
    )

    @property
    def reads_pairs(self) -> bool:
        """Whether a document is a pair of texts."""
        return self.source_lang is not None

    @property
    def part(self) -> Shard | None:
        """`shard` as numbers; None: all of the inputs."""
        return None if self.shard is None else as_shard(self.shard)

    def validate(self) -> Iterator[str]:
        if self.shard is not None and not is_shard(self.shard):
            yield f"shard is {self.shard!r}; it must be I/N, e.g. 2/8, with I from 1 to N and N at most {MAX_SHARDS}"
        if (self.source_lang is None) != (self.target_lang is None):
            yield "`source_lang` and `target_lang` belong together; give both or none"
        elif self.source_lang == self.target_lang and self.source_lang is not None:
            yield f"source_lang and target_lang are both {self.source_lang}; they must differ"
        if not any(self.files().values()):
            yield "`trainpref`, `validpref` and `testpref` are missing; give at least one"
        yield from super().validate()
        for name, ratio in (("valid", self.valid_ratio), ("test", self.test_ratio)):
            if ratio and self.trainpref is None:
                yield f"{name}_ratio is {ratio}, but there is no trainpref to take documents from"
            elif ratio and name in self.files():
                yield f"{name}_ratio and {name}pref both make the split {name}; give one of them"
        if self.valid_ratio + self.test_ratio >= 1.0:
            yield f"valid_ratio + test_ratio is {self.valid_ratio + self.test_ratio}; it must be below 1"

    def files(self) -> dict[str, str]:
        """Split -> comma-separated files, for the splits that are given."""
        given = {"train": self.trainpref, "valid": self.validpref, "test": self.testpref}
        return {split: files for split, files in given.items() if files is not None}

    def held_out(self, split: str) -> dict[str, float]:
        """Split -> share of the documents of `split` that go there instead."""
        ratios = {"test": self.test_ratio, "valid": self.valid_ratio}
        return {name: ratio for name, ratio in ratios.items() if ratio and split == "train"}


def is_shard(text: str) -> bool:
    """Whether a text is "I/N" with I from 1 to N."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, flags=re.ASCII)
    return found is not None and 1 <= int(found[1]) <= int(found[2]) <= MAX_SHARDS


def as_shard(text: str) -> Shard:
    """The numbers of an "I/N" that `is_shard` accepts."""
    number, _, count = text.partition("/")
    return Shard(int(number), int(count))


@dataclass(kw_only=True)
class DocumentConfig:
    """What is done to documents, and which are left out."""

    normalize: str = option("none", "Unicode normal form that texts are converted to first", choices=NORMAL_FORMS)
    dedup: bool = option(
        False,
        "leave out documents whose text occurred before in the same split, in any of its files; splits are not "
        "compared with each other, but held-out documents leave no copy in train",
    )
    min_tokens: int = option(1, "leave out documents of fewer tokens", unit="tokens", min=1)
    max_tokens_per_document: int | None = option(None, "leave out documents of more tokens", unit="tokens")
    append_eos: bool = option(False, "append the tokenizer's end token to each document; the limits do not count it")

    def validate(self) -> Iterator[str]:
        if self.max_tokens_per_document is not None and self.max_tokens_per_document < self.min_tokens:
            yield (
                f"max_tokens_per_document is {self.max_tokens_per_document}; "
                f"it must be at least min_tokens, which is {self.min_tokens}"
            )


@dataclass(kw_only=True)
class OutputConfig:
    destdir: str = required("folder to make; it appears when all is done", daily=True, metavar="DIR")
    overwrite: bool = option(False, "replace DIR, if ftk-preprocess has written it", daily=True)
    workers: int | None = option(
        None, "processes that encode; default: one for each CPU core", daily=True, max=1024, metavar="N", min=1
    )
    user_dir: str | None = option(None, "your package, folder or file that registers tokenizers", metavar="PATH")

    def validate(self) -> Iterator[str]:
        if not self.destdir.strip():
            yield "destdir is empty; it must name a folder"


@dataclass(kw_only=True)
class TrainingConfig:
    """Training a SentencePiece model on the training text, where no vocabulary is given."""

    vocab_size: int | None = option(
        None,
        "train a model with this many pieces instead of reading one",
        daily=True,
        unit="pieces",
        min=1,
        max=2**31 - 1,
    )
    source_vocab_size: int | None = option(
        None,
        "train one model on the targets and another, of this many pieces, on the sources; else one on both",
        needs={"vocab_size": True, "source_lang": True},
        unit="pieces",
        min=1,
        max=2**31 - 1,
    )
    model_type: str = option(
        "unigram", "kind of model", needs={"vocab_size": True}, choices=("unigram", "bpe", "char", "word")
    )
    character_coverage: float = option(
        0.9995, "share of characters that get a piece; the others become bytes", "(0, 1]", needs={"vocab_size": True}
    )
    max_lines: int = option(
        1_000_000,
        "train on a random sample of this many lines; 0: all",
        needs={"vocab_size": True},
        unit="lines",
        flag="--train-lines",
        min=0,
    )
