"""From text files to a data folder: `{train,valid,test}.{bin,idx}`, `tokenizer/`, `preprocess.json`."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ftk.data.child_process import call_in_child
from ftk.data.encoding import EncodedBlock, EncoderPool, EncodingSettings
from ftk.data.indexed_dataset import IndexedDatasetWriter, optimal_dtype
from ftk.data.output_folder import RECORD, describe_files, whole_folder
from ftk.data.preprocess_config import InputConfig, OutputConfig, TrainingConfig
from ftk.data.records import read_documents
from ftk.data.text import Block, Problem, expand_paths, kind_of, read_blocks
from ftk.errors import UserError
from ftk.tokenizers import Tokenizer, train_sentencepiece
from ftk.version import __version__

logger = logging.getLogger(__name__)

MAX_LISTED_PROBLEMS = 10_000  # in preprocess.json, for each split; all are counted
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class SplitReport:
    """What became of one split.

    Attributes:
        sources: file -> bytes on disk.
        documents, tokens, num_bytes: written documents, their tokens, bytes of text read.
        skipped: reason -> documents left out.
        problems: those that could not be read, the first `MAX_LISTED_PROBLEMS`.
        seconds: time it took.
    """

    sources: dict[str, int]
    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, block: EncodedBlock) -> None:
        self.documents += block.lengths.size
        self.tokens += block.tokens.size
        self.num_bytes += block.num_bytes
        self.skipped["empty"] += block.num_empty
        self.skipped["no_tokens"] += block.num_without_tokens
        self.skipped.update(problem.reason for problem in block.problems)
        self.problems += block.problems[: MAX_LISTED_PROBLEMS - len(self.problems)]

    def record(self) -> dict[str, Any]:
        """Its part of preprocess.json: nothing that differs between two runs on the same text."""
        return {
            "sources": [{"path": path, "bytes": size} for path, size in self.sources.items()],
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.num_bytes,
            "skipped": {reason: count for reason, count in sorted(self.skipped.items()) if count},
            "problems": [problem._asdict() for problem in self.problems],
        }


def preprocess(
    inputs: InputConfig,
    output: OutputConfig,
    make_tokenizer: Callable[[Path | None], Tokenizer],
    training: TrainingConfig | None = None,
) -> str:
    """Encodes the splits and writes the data folder, whole or not at all.

    Args:
        inputs, output: the options.
        make_tokenizer: builds the tokenizer; gets the path of the model trained here, or None.
        training: train a SentencePiece model on the training text first.

    Returns:
        a table of what was written, for people.

    Raises:
        UserError: a file, a document (unless those are skipped), an option or the destination is wrong.
    """
    files = {split: expand_paths(names, inputs.document_separator) for split, names in inputs.files().items()}
    destination = Path(output.destdir)
    skip = inputs.on_error == "skip"
    try:
        with whole_folder(destination, output.overwrite) as folder:
            with tempfile.TemporaryDirectory(prefix="ftk-preprocess-") as scratch:
                model = None
                if training is not None:
                    logger.info("training a SentencePiece model of %s pieces", training.vocab_size)
                    model = call_in_child(_train_tokenizer, inputs, training, files, Path(scratch))
                tokenizer = make_tokenizer(model)
                tokenizer.save(folder / "tokenizer")
            settings = EncodingSettings(
                tokenizer_folder=folder / "tokenizer",
                dtype=optimal_dtype(tokenizer.vocab_size),
                text_key=inputs.text_key,
                stop_at_problem=not skip,
                user_dir=output.user_dir,
            )
            with EncoderPool(output.workers or _num_cores(), settings) as pool:
                reports = {
                    split: _write_split(split, paths, inputs, pool, folder, settings.dtype)
                    for split, paths in files.items()
                }
            record = _record(inputs, tokenizer, settings.dtype, reports) | {"files": describe_files(folder)}
            (folder / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        if error.errno in _DISK_FULL and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(destination)) from error
        raise
    return _table(reports, destination)


def _train_tokenizer(inputs: InputConfig, training: TrainingConfig, files: dict[str, list[str]], folder: Path) -> Path:
    assert training.vocab_size is not None
    if "train" not in files:
        raise UserError("--vocab-size trains a model on the training text; give --trainpref")
    ignore = (lambda problem: None) if inputs.on_error == "skip" else None  # they are counted when encoded
    documents = read_documents(
        files["train"],
        format=inputs.format,
        separator=inputs.document_separator,
        text_key=inputs.text_key,
        on_problem=ignore,
    )
    return train_sentencepiece(
        (document.text for document in documents),
        folder,
        vocab_size=training.vocab_size,
        model_type=training.model_type,
        character_coverage=training.character_coverage,
        max_lines=training.max_lines,
    )


def _write_split(
    split: str, paths: list[str], inputs: InputConfig, pool: EncoderPool, folder: Path, dtype: np.dtype[Any]
) -> SplitReport:
    report = SplitReport({path: os.path.getsize(path) for path in paths})
    started = time.monotonic()
    with IndexedDatasetWriter(folder / split, dtype) as writer, _Progress(split, report.sources) as progress:
        for block in pool.encode(_blocks(paths, inputs)):
            if block.problems and inputs.on_error == "raise":
                raise UserError(str(block.problems[0]))
            writer.add_documents(block.tokens, block.lengths)
            report.add(block)
            progress.show(block, report.documents)
    report.seconds = time.monotonic() - started
    if not report.documents:
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(report.skipped.items()) if count)
        raise UserError(f"{', '.join(paths)}: no documents for {split} (skipped: {skipped or 'none'})")
    return report


def _blocks(paths: list[str], inputs: InputConfig) -> Iterator[Block]:
    for path in paths:
        yield from read_blocks(path, kind_of(path, inputs.format, inputs.document_separator))


class _Progress:
    """A bar on stderr: how much of the files has been read, MB/s, documents/s, time left."""

    def __init__(self, split: str, sources: dict[str, int]) -> None:
        from tqdm import tqdm

        self._before: dict[str, int] = {}
        total = 0
        for path, size in sources.items():
            self._before[path] = total
            total += size
        # To a terminal ten times a second; to a file every ten seconds.
        self._bar = tqdm(
            total=total,
            desc=split,
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            mininterval=0.1 if sys.stderr.isatty() else 10.0,
            dynamic_ncols=True,
        )
        self._started = time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def show(self, block: EncodedBlock, documents: int) -> None:
        rate = documents / max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{rate:,.0f} documents/s", refresh=False)
        self._bar.update(self._before[block.source] + block.disk_bytes - self._bar.n)

    def __exit__(self, *error: object) -> None:
        self._bar.close()


def _record(
    inputs: InputConfig, tokenizer: Tokenizer, dtype: np.dtype[Any], reports: dict[str, SplitReport]
) -> dict[str, Any]:
    return {
        "ftk_version": __version__,
        "settings": {
            "format": inputs.format,
            "document_separator": inputs.document_separator,
            "text_key": inputs.text_key,
            "on_error": inputs.on_error,
        },
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
        },
        "dtype": dtype.name,
        "splits": {split: report.record() for split, report in reports.items()},
    }


def _table(reports: dict[str, SplitReport], destination: Path) -> str:
    rows = [("split", "documents", "tokens", "tokens/document", "skipped", "seconds", "MB/s")]
    for split, report in reports.items():
        rows.append(
            (
                split,
                f"{report.documents:,}",
                f"{report.tokens:,}",
                f"{report.tokens / report.documents:.1f}",
                f"{sum(report.skipped.values()):,}",
                f"{report.seconds:.1f}",
                f"{report.num_bytes / 1e6 / max(report.seconds, 1e-9):.2f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    for split, report in reports.items():
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(report.skipped.items()) if count)
        if counts:
            where = f"; listed in {destination / RECORD}" if report.problems else ""
            lines.append(f"{split}: skipped {counts}{where}")
    lines += [
        "",
        f"written: {destination}",
        f"next:    ftk-data stats {destination}",
    ]
    if "train" in reports:
        lines.append(
            f"         ftk-train {destination} --task glm_blank --arch glm_tiny --max-update 1000 --save-dir run"
        )
    return "\n".join(lines)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
