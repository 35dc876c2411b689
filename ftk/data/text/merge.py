"""Joining the folders of the shards of a run (`shard`) into the one that a single machine would have written."""

from __future__ import annotations

import glob
import itertools
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ftk.data.indexed.check import forget_pages
from ftk.data.indexed.dataset import IndexedDataset
from ftk.data.indexed.output_folder import RECORD, describe_files, read_record, whole_folder, write_record
from ftk.data.text.blocks import Problem
from ftk.data.text.encoding import EncodedBlock
from ftk.data.text.preprocess_config import Shard
from ftk.data.text.preprocess_report import MAX_LISTED_PROBLEMS
from ftk.data.text.split_writer import SplitWriter, hashes_path
from ftk.errors import UserError, counted
from ftk.files import open_regular, reason, sha256_of

_SLICE = 1 << 14  # documents that are copied together
_SAME = ("ftk_version", "settings", "tokenizer", "dtype")
_SUMS = ("documents", "tokens", "bytes")


@dataclass(frozen=True)
class ShardFolder:
    """A folder that was written with `shard`, with what its preprocess.json says."""

    folder: Path
    shard: Shard
    record: dict[str, Any]

    @property
    def splits(self) -> dict[str, dict[str, Any]]:
        return self.record["splits"]

    @property
    def inputs(self) -> dict[str, Any]:
        """Split -> where its documents come from, in this order in all shards of a run."""
        return {split: (entry.get("held_out_of"), entry["sources"]) for split, entry in self.splits.items()}


def merge(names: Sequence[str], destdir: str, overwrite: bool) -> str:
    """Writes the data folder that ftk-preprocess would have written without `shard`, byte for byte.

    Memory use does not depend on the size of the data, except with `dedup`: 64 bits of each document.

    Args:
        names: the folders of all shards, in any order, also several in one name as A,B; patterns are expanded.
        destdir: folder to make, whole or not at all.
        overwrite: replace it, if ftk has written it.

    Returns:
        lines that say what was written.

    Raises:
        UserError: a shard is missing, there twice, damaged, or of another run.
    """
    shards = _all_of_one_run([_open(folder) for folder in _folders(names)])
    first = shards[0].record
    splits: dict[str, dict[str, Any]] = {}
    checksums: dict[str, str] = {}
    with whole_folder(Path(destdir), overwrite) as folder:
        shutil.copytree(shards[0].folder / "tokenizer", folder / "tokenizer")
        duplicates: Counter[str] = Counter()
        for split, entry in first["splits"].items():
            writer = _write(folder, split, shards)
            splits[split] = _joined(split, shards) | {
                "documents": writer.documents[split],
                "tokens": writer.tokens[split],
            }
            duplicates[entry.get("held_out_of", split)] += writer.duplicates
            checksums |= writer.checksums()
            if not writer.documents[split]:
                raise UserError(f"the shards have no documents for {split}; run ftk-preprocess with other inputs")
        for split, count in duplicates.items():
            skipped = Counter(splits[split]["skipped"]) + Counter(duplicate=count)
            splits[split]["skipped"] = dict(sorted(skipped.items()))
        record = {key: value for key, value in first.items() if key not in ("shard", "splits", "files")}
        write_record(folder, {**record, "splits": splits, "files": describe_files(folder, checksums)})
    counts = [
        f"{split}: {counted(entry['documents'], 'document', ',')}, {counted(entry['tokens'], 'token', ',')}"
        + "".join(f", {count:,} {name}" for name, count in entry["skipped"].items())
        for split, entry in splits.items()
    ]
    return "\n".join([*counts, f"written: {destdir}, of {counted(len(shards), 'shard', ',')}"])


def _folders(names: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    lists = [[name] if Path(name).exists() or glob.has_magic(name) else name.split(",") for name in names]
    for name in filter(None, itertools.chain.from_iterable(lists)):
        matches = sorted(glob.glob(name)) if glob.has_magic(name) and not Path(name).exists() else [name]
        if not matches:
            raise UserError(f"{name}: no folder matches this pattern")
        found += map(Path, matches)
    return found


def _open(folder: Path) -> ShardFolder:
    try:
        record = read_record(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / RECORD}: {reason(error)}; `shards` are folders written with `shard`") from error
    if "shard" not in record:
        raise UserError(f"{folder}: not written with `shard`; ftk-train reads several whole folders as A,B")
    try:
        shard = Shard(record["shard"]["number"], record["shard"]["count"])
        found = ShardFolder(folder, shard, record)
        for entry in found.splits.values():
            _ = [Counter(entry["skipped"]).total(), *(entry[name] + 0 for name in _SUMS)]
            _ = [Problem(**problem) for problem in entry["problems"]]
        _ = [Counter(lines).total() for lines in record["shard"]["line_ends"].values()]
        _ = found.inputs, [record[name] for name in _SAME]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / RECORD}: damaged ({error!r}); run this shard again") from error
    for name, entry in record["files"].items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else -1
        if size != entry["bytes"]:
            what = "missing" if size < 0 else f"{size:,} bytes, {RECORD} says {entry['bytes']:,}"
            raise UserError(f"{folder / name}: {what}; run shard {shard} again")
        if entry.get("sha256") not in (None, sha256_of(folder / name)):
            raise UserError(f"{folder / name}: altered, {RECORD} has another sha256; run shard {shard} again")
    return found


def _all_of_one_run(found: list[ShardFolder]) -> list[ShardFolder]:
    """The shards in their order.

    Raises:
        UserError: they are not those of one run, each once.
    """
    first = found[0]
    by_number: dict[int, ShardFolder] = {}
    for other in found:
        if other.shard.count != first.shard.count:
            raise UserError(
                f"{first.folder} is shard {first.shard}, {other.folder} {other.shard}: they are of two runs"
            )
        if other.shard.number in by_number:
            raise UserError(f"{by_number[other.shard.number].folder} and {other.folder} are both shard {other.shard}")
        by_number[other.shard.number] = other
        _check_same(first, other)
    missing = [str(number) for number in range(1, first.shard.count + 1) if number not in by_number]
    if missing:
        shown = ", ".join(missing[:10]) + (" ..." if len(missing) > 10 else "")
        raise UserError(
            f"of {first.shard.count} shards these are missing: {shown}; run ftk-preprocess "
            f"with `shard` {missing[0]}/{first.shard.count}"
        )
    return [by_number[number] for number in sorted(by_number)]


def _check_same(first: ShardFolder, other: ShardFolder) -> None:
    for name in _SAME:
        one, two = first.record[name], other.record[name]
        if one == two:
            continue
        if isinstance(one, dict) and isinstance(two, dict):
            name = next(f"{name}, {key}" for key in {**one, **two} if one.get(key) != two.get(key))
            key = name.partition(", ")[2]
            one, two = one.get(key), two.get(key)
        raise UserError(
            f"{other.folder} differs from {first.folder} in {name} ({two} and {one}); run shard {other.shard} again as "
            "the others were"
        )
    if other.inputs != first.inputs:
        raise UserError(
            f"{other.folder} was made of other files than {first.folder} (names or sizes, in {RECORD}); give every "
            "shard the same inputs"
        )


def _write(folder: Path, split: str, shards: Sequence[ShardFolder]) -> SplitWriter:
    """Copies the documents of a split, repeats among the shards left out with `dedup`."""
    record = shards[0].record
    dedup = bool(record["settings"].get("dedup"))
    with SplitWriter(folder, split, {}, np.dtype(record["dtype"]).newbyteorder("<"), dedup=dedup) as writer:
        for shard in shards:
            for block in _documents(shard.folder, split, with_hashes=dedup):
                writer.add(block)
    return writer


def _documents(folder: Path, split: str, *, with_hashes: bool) -> Iterator[EncodedBlock]:
    """All documents of a shard, some at a time."""
    dataset = IndexedDataset(folder / split)
    dataset.check()
    hashes: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
    if with_hashes and len(dataset):
        hashes = np.memmap(hashes_path(folder, split), dtype="<u8", mode="r")
        if len(hashes) != len(dataset):
            raise UserError(f"{hashes_path(folder, split)}: {len(hashes)} hashes of {len(dataset)} documents")
    with open_regular(dataset.paths[1]) as file:  # read, since pages of a file map would count as memory
        for first in range(0, len(dataset), _SLICE):
            count = min(_SLICE, len(dataset) - first)
            at = dataset.layout.sizes_at + 4 * first
            lengths = np.frombuffer(dataset.index, "<i4", count=count, offset=at).astype(np.int32)
            forget_pages(dataset.index, at, at + 4 * count)
            dataset.check_files()
            tokens = np.fromfile(file, dataset.dtype, int(lengths.sum(dtype=np.int64)))
            yield EncodedBlock(tokens, lengths, np.asarray(hashes[first : first + count]))


def _joined(split: str, shards: Sequence[ShardFolder]) -> dict[str, Any]:
    """The split's part of preprocess.json: counts summed, lines of problems from the start of each file."""
    entries = [shard.splits[split] for shard in shards]
    skipped: Counter[str] = Counter()
    problems: list[dict[str, Any]] = []
    before: Counter[str] = Counter()  # file -> line ends in the shards before
    for shard, entry in zip(shards, entries, strict=True):
        skipped.update(entry["skipped"])
        for problem in entry["problems"][: MAX_LISTED_PROBLEMS - len(problems)]:
            problems.append(problem | {"line": problem["line"] + before[problem["source"]]})
        before.update(shard.record["shard"]["line_ends"].get(split, {}))
    sums = {name: sum(entry[name] for entry in entries) for name in _SUMS}
    return entries[0] | sums | {"skipped": dict(sorted(skipped.items())), "problems": problems}
