"""ftk-data convert: a corpus in another form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ftk.config import compose, section
from ftk.data.text.files import MAX_DOCUMENT_BYTES

DESCRIPTION = """Converts data folders and text files: ids between ftk, Megatron and fairseq, ids to text and back.
Example: ftk-data convert data-bin text-again --to jsonl"""


@dataclass(kw_only=True)
class ConvertConfig:
    source: str = field(
        metadata={
            "help": "folder of .bin/.idx files or of text, or [SPLIT=]FILE[,...] of text",
            "positional": True,
            "metavar": "SRC",
            "path": True,
        }
    )
    destination: str = field(
        metadata={
            "help": "folder to make; it appears when all is done",
            "positional": True,
            "metavar": "DST",
            "path": True,
        }
    )
    to: str = field(
        metadata={
            "help": "ftk: with tokenizer, for ftk-train; megatron: .bin/.idx alone; fairseq: with dict.txt; "
            "jsonl, text: what the ids spell",
            "choices": ("ftk", "megatron", "fairseq", "jsonl", "text"),
        }
    )
    overwrite: bool = field(default=False, metadata={"help": "replace DST, if ftk has written it"})
    tokenizer_folder: str | None = field(
        default=None,
        metadata={"help": "tokenizer where SRC holds none: a data folder or a checkpoint", "metavar": "DIR"},
    )
    keep_ids: bool = field(
        default=False, metadata={"help": "--to fairseq: the numbers as they are, without a dictionary"}
    )
    remove_bpe: str = field(
        default="none",
        metadata={
            "help": "from fairseq's ids to text: put pieces together",
            "choices": ("none", "subword_nmt", "sentencepiece"),
        },
    )
    source_lang: str | None = field(
        default=None, metadata={"help": "source language of a pair, or ending of its files", "metavar": "NAME"}
    )
    target_lang: str | None = field(
        default=None, metadata={"help": "target language of a pair, or ending of its files", "metavar": "NAME"}
    )
    text_key: str = field(default="text", metadata={"help": "from JSONL: field that holds the text"})
    on_error: str = field(
        default="raise",
        metadata={"help": "from text: stop at what cannot be read, or skip and count it", "choices": ("raise", "skip")},
    )
    max_document_bytes: int = field(
        default=MAX_DOCUMENT_BYTES,
        metadata={"help": "from text: a longer document counts as one that cannot be read", "unit": "bytes"},
    )

    def validate(self) -> Iterator[str]:
        if self.max_document_bytes < 1:
            yield f"max_document_bytes is {self.max_document_bytes}; it must be at least 1"


@dataclass(kw_only=True)
class ConvertCommand:
    convert: ConvertConfig = section("convert")


def convert_body(argv: list[str]) -> int:
    from ftk.data.convert import convert
    from ftk.data.convert_sources import open_source

    config = compose(ConvertCommand, "ftk-data convert", DESCRIPTION, argv).convert
    source = open_source(
        config.source,
        tokenizer_folder=config.tokenizer_folder,
        source_lang=config.source_lang,
        target_lang=config.target_lang,
        text_key=config.text_key,
        on_error=config.on_error,
        max_document_bytes=config.max_document_bytes,
        remove_bpe=config.remove_bpe,
    )
    print(
        convert(
            source,
            config.source,
            config.destination,
            config.to,
            overwrite=config.overwrite,
            keep_ids=config.keep_ids,
        )
    )
    return 0
