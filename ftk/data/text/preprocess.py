"""From text files to a data folder: `{train,valid,test}.{bin,idx}`, `tokenizer/`, `preprocess.json`."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import logging
import os
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ftk.child_process import call_in_child
from ftk.data.indexed.dataset import optimal_dtype
from ftk.data.indexed.folder_layout import SPLITS
from ftk.data.indexed.output_folder import whole_folder
from ftk.data.text.blocks import Block, Part, Problem
from ftk.data.text.encoding import EncoderPool, EncodingSettings, hash_texts, normalized
from ftk.data.text.files import PART_BYTES, cut_file
from ftk.data.text.pairs import SEPARATOR, expand_pairs, read_pairs, texts_of
from ftk.data.text.paths import ROWS, expand_paths, kind_of
from ftk.data.text.preprocess_config import DocumentConfig, InputConfig, OutputConfig, TrainingConfig
from ftk.data.text.preprocess_progress import ReadingProgress
from ftk.data.text.preprocess_report import SplitReport, next_steps, num_ids, table, write_record_of
from ftk.data.text.records import read_documents
from ftk.data.text.shards import Share, shares_of
from ftk.data.text.split_writer import SplitWriter, add_new, held_out_documents
from ftk.errors import UserError
from ftk.tokenizers import Tokenizer, train_sentencepiece, with_special_tokens

logger = logging.getLogger(__name__)

Files: TypeAlias = tuple[str, ...]
"""A file of documents, or two files of pairs."""

_MAX_JOINED_FILES = 256  # small files that are encoded together
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SOURCES, _TARGETS, _BOTH = slice(0, 1), slice(1, 2), slice(None)  # of a pair


def preprocess(
    inputs: InputConfig,
    output: OutputConfig,
    make_tokenizer: Callable[[Path | None], Tokenizer],
    training: TrainingConfig | None = None,
    documents: DocumentConfig | None = None,
) -> str:
    """Encodes the splits and writes the data folder, whole or not at all.

    Args:
        make_tokenizer: builds a tokenizer; gets the path of its vocabulary, or None for that of the options.
        training: train a SentencePiece model on the training text first.
        documents: which documents are left out, and what is done to the others.

    Returns:
        a table of what was written.

    Raises:
        UserError: a file, a document (unless those are skipped), an option or the destination is wrong.
    """
    documents = documents or DocumentConfig()
    files = {split: _files(names, inputs) for split, names in inputs.files().items()}
    _check_text_key(inputs, itertools.chain.from_iterable(map(_unique_paths, files.values())))
    destination = Path(output.destdir)
    try:
        with whole_folder(destination, output.overwrite) as folder:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                vocabulary, *of_sources = _vocabularies(inputs, training, documents, files, Path(scratch))
                tokenizer = make_tokenizer(vocabulary)
                if inputs.reads_pairs:
                    tokenizer = with_special_tokens(tokenizer, "with_end")
                for path in of_sources:
                    tokenizer.source = with_special_tokens(make_tokenizer(path), "with_end")
                tokenizer.save(folder / "tokenizer")
            reports = _write_splits(folder, files, tokenizer, inputs, output, documents)
    except OSError as error:
        if error.errno in _DISK_FULL and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(destination)) from error
        raise
    return table(reports, destination, next_steps(destination, tokenizer, reports, inputs, output.user_dir))


def _write_splits(
    folder: Path,
    files: Mapping[str, list[Files]],
    tokenizer: Tokenizer,
    inputs: InputConfig,
    output: OutputConfig,
    documents: DocumentConfig,
) -> dict[str, SplitReport]:
    """Writes all splits and the record of them; a report for each."""
    settings = EncodingSettings(
        tokenizer_folder=folder / "tokenizer",
        dtype=optimal_dtype(num_ids(tokenizer)),
        text=inputs,
        documents=documents,
        user_dir=output.user_dir,
        end_token=_end_token(tokenizer, inputs, documents),
        pairs=inputs.reads_pairs,
        source_end=_end_token(tokenizer.of_source, inputs, documents) if inputs.reads_pairs else None,
        with_hashes=documents.dedup or bool(inputs.held_out("train")),
        unknown=_unknown(tokenizer),
    )
    reports: dict[str, SplitReport] = {}
    checksums: dict[str, str] = {}
    with EncoderPool(output.workers or _num_cores(), settings, tokenizer) as pool:
        for split, paths in files.items():
            writer = SplitWriter(
                *(folder, split, inputs.held_out(split), settings.dtype),
                dedup=documents.dedup,
                keep_hashes=documents.dedup and inputs.part is not None,
            )
            reports |= _write_split(split, paths, inputs, pool, writer)
            checksums |= writer.checksums()
    reports = {split: reports[split] for split in SPLITS if split in reports}
    write_record_of(folder, _settings(inputs, documents), tokenizer, reports, checksums, inputs.part)
    return reports


def _files(names: str, inputs: InputConfig) -> list[Files]:
    if inputs.reads_pairs:
        return list(expand_pairs(names, inputs))
    return [(path,) for path in expand_paths(names, inputs.document_separator, inputs.format)]


def _unique_paths(files: Iterable[Files]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(files)))


def _check_text_key(inputs: InputConfig, paths: Iterable[str]) -> None:
    is_default = inputs.text_key == InputConfig.text_key
    if not is_default and not any(kind_of(path, inputs.format) in ("jsonl", ROWS) for path in paths):
        raise UserError(
            f"text_key is {inputs.text_key!r}, but no input is read as JSON lines or as a table; give `format` jsonl, "
            "or leave `text_key` out"
        )


def _vocabularies(
    inputs: InputConfig,
    training: TrainingConfig | None,
    documents: DocumentConfig,
    files: dict[str, list[Files]],
    folder: Path,
) -> list[Path | None]:
    """Vocabularies of all texts; or of targets, then of sources. None: that of the options."""
    given, size = inputs.source_tokenizer_path, None if training is None else training.source_vocab_size
    if given is not None and size is not None:
        raise UserError(
            "`source_tokenizer_path` names a vocabulary, `source_vocab_size` trains one; leave out one of the two"
        )

    def trained(side: slice, name: str, vocab_size: int | None = None) -> Path | None:
        if training is None:
            return None
        options = dataclasses.replace(training, vocab_size=vocab_size or training.vocab_size)
        logger.info("training a SentencePiece model of %s pieces", options.vocab_size)
        return call_in_child(_train_tokenizer, inputs, options, documents, files, folder / name, side)

    if given is None and size is None:
        return [trained(_BOTH, "both")]
    source = trained(_SOURCES, "sources", size) if given is None else Path(given)
    return [trained(_TARGETS, "targets"), source]


def _end_token(tokenizer: Tokenizer, inputs: InputConfig, documents: DocumentConfig) -> int | None:
    """What closes documents, or the two texts of each; None: nothing does."""
    if not (documents.append_eos or inputs.reads_pairs):
        return None
    end = tokenizer.special.text_end
    if end is None:
        if inputs.reads_pairs:
            raise UserError(
                f"`source_lang`: the tokenizer {tokenizer.name} has no end token for the texts of pairs; name its "
                "eos_token in tokenizer_config.json"
            )
        raise UserError(
            f"`append_eos`: the tokenizer {tokenizer.name} has no end token; `special_tokens` with_end adds one"
        )
    return end


def _unknown(tokenizer: Tokenizer) -> int | None:
    """The id of what a vocabulary cannot spell; None: there is none, or it has other uses (GPT-2's ends texts, too)."""
    special, source = tokenizer.special, tokenizer.of_source.special
    return None if special.unk in (special.eos, special.text_end) or special.unk != source.unk else special.unk


def _train_tokenizer(
    inputs: InputConfig,
    training: TrainingConfig,
    documents: DocumentConfig,
    files: dict[str, list[Files]],
    folder: Path,
    side: slice,
) -> Path:
    assert training.vocab_size is not None
    if "train" not in files:
        raise UserError("`vocab_size` trains a model on the training text; give `trainpref`")
    return train_sentencepiece(
        _training_texts(inputs, documents, files["train"], side),
        folder,
        vocab_size=training.vocab_size,
        model_type=training.model_type,
        character_coverage=training.character_coverage,
        max_lines=training.max_lines,
    )


def _training_texts(
    inputs: InputConfig, options: DocumentConfig, paths: list[Files], side: slice = _BOTH
) -> Iterator[str]:
    """The texts of the split train, as they will be encoded: normalized, without repeats and what is held out.

    `side`: of pairs, which of the two.
    """
    held_out = inputs.held_out("train")
    seen: set[int] = set()
    found = False
    texts: Iterable[str]
    if inputs.reads_pairs:
        texts = texts_of(paths, inputs)
    else:
        named = [path for path, *_ in paths]
        documents = read_documents(named, inputs, inputs.format)  # what is skipped is counted when it is encoded
        texts = (document.text for document in documents)
    for text in texts:
        text = normalized(text, options.normalize)
        if options.dedup or held_out:
            hashes = hash_texts([text])
            if options.dedup and not add_new(seen, hashes)[0]:
                continue
            if any(mask[0] for _, mask in held_out_documents(hashes, held_out)):
                continue
        found = True
        yield from text.split(SEPARATOR)[side]
    if not found:
        where = ", ".join(_unique_paths(paths))
        raise UserError(f"{where}: there is no text to train a tokenizer on: every line is empty, or cannot be read")


def _write_split(
    split: str, paths: list[Files], inputs: InputConfig, pool: EncoderPool, writer: SplitWriter
) -> dict[str, SplitReport]:
    """The reports of the split and of those held out of it."""
    report = SplitReport({path: os.path.getsize(path) for path in _unique_paths(paths)})
    shares = list(shares_of(paths, inputs.part))
    ranges = {share.files[0] for share in shares if not share.is_whole}
    started = time.monotonic()
    lines, source = 0, ""  # of this file, in the parts before
    with writer, ReadingProgress(split, shares) as progress:
        for block in pool.encode(_tasks(shares, inputs)):
            lines = 0 if block.starts_file or block.source != source else lines
            problems = [problem._replace(line=problem.line + lines) for problem in block.problems]
            lines, source = lines + block.num_lines, block.source
            if source in ranges:
                report.line_ends[source] = lines
            if problems and inputs.on_error == "raise":
                raise UserError(str(_with_known_line(problems[0], shares)))
            writer.add(block)
            report.add(block, problems)
            progress.show(block, sum(writer.documents.values()))
    report.skipped["duplicate"] = writer.duplicates
    report.seconds = time.monotonic() - started
    reports = {split: report} | {name: SplitReport({}, held_out_of=split) for name in inputs.held_out(split)}
    for name, of_split in reports.items():
        of_split.documents, of_split.tokens = writer.documents[name], writer.tokens[name]
        if not of_split.documents and inputs.shard is None:
            skipped = ", ".join(f"{count} {reason}" for reason, count in report.reasons().items())
            skipped = skipped or ("none" if report.num_bytes else "none; there is no text")
            ratio = "" if name == split else f"; {name}_ratio is {inputs.held_out(split)[name]}"
            raise UserError(f"{', '.join(_unique_paths(paths))}: no documents for {name} (skipped: {skipped}){ratio}")
    return reports


def _with_known_line(problem: Problem, shares: Iterable[Share]) -> Problem:
    """The problem without its line, where lines are not counted from the start of the file."""
    within = any(share.start > 0 and share.files[0] == problem.source for share in shares)
    return problem._replace(line=0) if within else problem


def _tasks(shares: Iterable[Share], inputs: InputConfig) -> Iterator[list[Part | Block]]:
    """Parts of files, or several small files together: enough work for one message."""
    if inputs.reads_pairs:
        for share in shares:
            for block in read_pairs(share.files, inputs) if share.start == 0 else ():
                yield [block]
        return
    small: list[Part | Block] = []
    num_bytes = 0
    limits: dict[str, Any] = {"max_document_bytes": inputs.max_document_bytes, "column": inputs.text_key}
    for (path, *_), start, stop, _ in shares:
        kind = kind_of(path, inputs.format, inputs.document_separator)
        for item in cut_file(path, kind, start=start, stop=stop, **limits):
            is_whole = isinstance(item, Part) and item.is_first and item.is_last
            if small and (not is_whole or num_bytes + item.disk_bytes > PART_BYTES or len(small) == _MAX_JOINED_FILES):
                yield small
                small, num_bytes = [], 0
            if is_whole:
                small.append(item)
                num_bytes += item.disk_bytes
            else:
                yield [item]
            if isinstance(item, Block) and item.problem and inputs.on_error == "raise":
                return  # what follows is not used, and may have no end
    if small:
        yield small


def _settings(inputs: InputConfig, documents: DocumentConfig) -> dict[str, Any]:
    normalized_by = {} if documents.normalize == "none" else {"unicode_version": unicodedata.unidata_version}
    return {
        "format": inputs.format,
        "document_separator": inputs.document_separator,
        "text_key": inputs.text_key,
        "max_document_bytes": inputs.max_document_bytes,
        "on_error": inputs.on_error,
        "valid_ratio": inputs.valid_ratio,
        "test_ratio": inputs.test_ratio,
        **({"source_lang": inputs.source_lang, "target_lang": inputs.target_lang} if inputs.reads_pairs else {}),
        **dataclasses.asdict(documents),
        **normalized_by,
    }


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
