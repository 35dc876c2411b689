"""What ftk-preprocess did: the record in the folder, and what is printed."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftk.builtins import FIRST_ARCHITECTURE, FIRST_ARCHITECTURES, FIRST_OF_PAIRS, FIRST_OF_TWO_VOCABULARIES
from ftk.data.indexed.dataset import optimal_dtype
from ftk.data.indexed.output_folder import RECORD, describe_files, write_record
from ftk.data.text.blocks import Problem
from ftk.data.text.encoding import EncodedBlock
from ftk.data.text.preprocess_config import InputConfig, Shard
from ftk.files import read_json
from ftk.terminal import in_columns
from ftk.tokenizers import Tokenizer
from ftk.version import __version__

MAX_LISTED_PROBLEMS = 10_000  # in preprocess.json, for each split; all are counted
_SHOWN_UNKNOWN, _MANY_UNKNOWN = 0.001, 0.05  # of the tokens


@dataclass
class SplitReport:
    """The result of one split.

    Attributes:
        sources: file -> bytes on disk.
        held_out_of: the split whose files its documents come from, where it has none of its own.
        documents, tokens: what was written.
        num_bytes: bytes of text read.
        encoded, unknown: tokens before repeats and held-out documents are taken away, and those of them that stand for
            what the vocabulary cannot spell.
        skipped: reason -> documents left out, those that other splits would have got included.
        problems: documents that could not be read, the first `MAX_LISTED_PROBLEMS`.
        seconds: duration.
        line_ends: of a shard: file that it has a range of -> line ends in the range, from which the lines of `problems`
            are counted.
    """

    sources: dict[str, int]
    held_out_of: str | None = None
    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    encoded: int = 0
    unknown: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    seconds: float = 0.0
    line_ends: dict[str, int] = field(default_factory=dict)

    def add(self, block: EncodedBlock, problems: list[Problem]) -> None:
        self.num_bytes += block.num_bytes
        self.encoded += len(block.tokens)
        self.unknown += block.num_unknown
        self.skipped.update(block.skipped)
        self.skipped.update(problem.reason for problem in problems)
        self.problems += problems[: MAX_LISTED_PROBLEMS - len(self.problems)]

    def reasons(self) -> dict[str, int]:
        """Reason -> documents left out, where there are any, in the order of the names."""
        return {reason: count for reason, count in sorted(self.skipped.items()) if count}

    def record(self) -> dict[str, Any]:
        """Its part of preprocess.json: nothing that differs between two runs on the same text."""
        held_out = {} if self.held_out_of is None else {"held_out_of": self.held_out_of}
        return held_out | {
            "sources": [{"path": path, "bytes": size} for path, size in self.sources.items()],
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.num_bytes,
            "skipped": self.reasons(),
            "problems": [problem._asdict() for problem in self.problems],
        }


def num_ids(tokenizer: Tokenizer) -> int:
    """Ids are below."""
    return max(tokenizer.vocab_size, tokenizer.of_source.vocab_size)


def write_record_of(
    folder: Path,
    settings: dict[str, Any],
    tokenizer: Tokenizer,
    reports: dict[str, SplitReport],
    checksums: dict[str, str],
    shard: Shard | None = None,
) -> None:
    """Writes the preprocess.json of a folder that is complete but for it.

    Args:
        folder: with everything else in it.
        settings: options that decided what was written.
        reports: by split.
        checksums: file -> sha256, of files that need not be read for it.
        shard: of which this is the folder.
    """
    line_ends = {split: report.line_ends for split, report in reports.items() if report.line_ends}
    record = {
        "ftk_version": __version__,
        "settings": settings,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint, "vocab_size": num_ids(tokenizer)},
        "dtype": optimal_dtype(num_ids(tokenizer)).name,
        **({} if shard is None else {"shard": {**dataclasses.asdict(shard), "line_ends": line_ends}}),
        "splits": {split: report.record() for split, report in reports.items()},
        "files": describe_files(folder, checksums),
    }
    write_record(folder, record)


def table(reports: dict[str, SplitReport], destination: Path, next_steps: list[str]) -> str:
    rows = [("split", "documents", "tokens", "tokens/document", "skipped", "seconds", "MB/s")]
    for split, report in reports.items():
        rows.append(
            (
                split,
                f"{report.documents:,}",
                f"{report.tokens:,}",
                f"{report.tokens / max(report.documents, 1):.1f}",
                f"{sum(report.skipped.values()):,}",
                "" if report.held_out_of else f"{report.seconds:.1f}",
                "" if report.held_out_of else f"{report.num_bytes / 1e6 / max(report.seconds, 1e-9):.2f}",
            )
        )
    lines = in_columns(rows)
    for split, report in reports.items():
        counts = ", ".join(f"{count:,} {reason}" for reason, count in report.reasons().items())
        if counts:
            where = f"; listed in {destination / RECORD}" if report.problems else ""
            lines.append(f"{split}: skipped {counts}{where}")
        share = report.unknown / max(report.encoded, 1)
        if share >= _SHOWN_UNKNOWN:
            bad = "; this vocabulary does not fit the text: choose another --tokenizer or --tokenizer-path"
            lines.append(f"{split}: {share:.2%} of the tokens are unknown{bad if share > _MANY_UNKNOWN else ''}")
    return "\n".join([*lines, "", f"written: {destination}", *next_steps])


def next_steps(
    destination: Path,
    tokenizer: Tokenizer,
    reports: dict[str, SplitReport],
    inputs: InputConfig,
    user_dir: str | None,
) -> list[str]:
    folder = shlex.quote(str(destination))
    if inputs.part is not None:
        count = inputs.part.count
        return [f"next:    when all {count:,} are there: ftk-data merge --shards {folder} ... --destdir DIR"]
    lines = [f"next:    ftk-data stats {folder}"]
    if "train" in reports:
        validation = "" if "valid" in reports else " --valid-subset none"
        plugin = "" if user_dir is None else f" --user-dir {shlex.quote(user_dir)}"
        start = first_model(tokenizer, inputs.reads_pairs)
        lines.append(f"         ftk-train {folder} {start} --max-update 500{validation} --save-dir run{plugin}")
    return lines


def first_model(tokenizer: Tokenizer, has_pairs: bool) -> str:
    """Flags of ftk-train that fit the tokenizer: the model of its folder, else a small one."""
    path = tokenizer.config.path
    has_model = path and (Path(path) / "config.json").is_file() and any(Path(path).glob("*.safetensors"))
    from_it = f"--finetune-from {shlex.quote(str(path))}"
    if tokenizer.source is not None:
        return FIRST_OF_TWO_VOCABULARIES
    if has_pairs:
        config = read_json(Path(path) / "config.json") if path and has_model else {}
        if not config.get("is_encoder_decoder"):
            return f"--arch {FIRST_OF_PAIRS} --task translation"
        start, special = config.get("decoder_start_token_id"), tokenizer.special
        is_pad = start is not None and start == special.pad != special.text_end
        return f"{from_it} --task translation{' --decoder-start pad' if is_pad else ''}"
    if has_model:
        return from_it
    layout = "" if tokenizer.special_tokens is None else tokenizer.special_tokens.name
    special = tokenizer.special
    first = special.bos if special.cls is None else special.cls
    if tokenizer.special_tokens is None and None not in (first, special.mask, special.pad):
        layout = "with_mask"
    return f"--arch {FIRST_ARCHITECTURES.get(layout, FIRST_ARCHITECTURE)}"
