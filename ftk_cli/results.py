"""--results-path: answers go to a file record by record, and the same command continues where a run stopped."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ftk.errors import UserError
from ftk_cli.answer_lines import one_line

if TYPE_CHECKING:
    from ftk.model_parallel.world import World

SETTINGS_SUFFIX = ".settings.json"
"""Behind the results' name: the file that says which command they are of."""


@dataclass(frozen=True)
class OldRecord:
    """A complete record of an earlier run.

    Attributes:
        source: as the record holds it; None where the sample could not be answered.
        answers: text and reference of each blank, where the record has references.
        likeliest: log-probability and tokens of the likeliest of the answers that were given, in JSON.
    """

    source: str | None
    answers: list[tuple[str, str]] = field(default_factory=list)
    likeliest: tuple[float, int] | None = None


class ResultsFile:
    """A file of results, open for what comes next.

        results = ResultsFile("out.jsonl", settings, as_json=True)
        for records in results.old_blocks(64): ...
        results.go_on(number_of_records)
        results.write(lines)

    Beside it stands FILE.settings.json with the settings. Records are complete samples in input order; what an
    interruption has cut does not count, in text also the last sample of DATA, whose end cannot be seen.

    Nothing on the disk changes before the first `write`: neither is an old file emptied, nor a new one made.

    Args:
        path: the file; its folder is made.
        settings: whatever decides the answers; JSON.
        as_json: whether the records are JSON lines, else text.
        overwrite: whether to begin anew where the file is there already.
        world: processes that work together, all of them on such an object: all read what is there, and the main one
            writes. None: this one alone.

    Raises:
        UserError: the file is of other settings, or of none, or cannot be written.
    """

    def __init__(
        self,
        path: str,
        settings: dict[str, Any],
        *,
        as_json: bool,
        overwrite: bool = False,
        world: World | None = None,
    ) -> None:
        self.path, self.as_json, self.world = Path(path), as_json, world
        self._settings_path = self.path.with_name(self.path.name + SETTINGS_SUFFIX)
        self._settings = json.loads(json.dumps(settings))
        self._overwrite = overwrite
        self._ends: dict[int, int] = {}  # number of records -> byte behind them, where `go_on` may begin
        self._begins_at: int | None = None  # the byte where the first `write` goes
        self._has_begun = False  # there was a `write`
        self._writes = world is None or world.is_main
        if world is None:
            self._stream = self._open()
        else:
            from ftk.model_parallel.together import together

            self._stream = together(world, self._open)

    def _open(self) -> BinaryIO | None:
        """The file as it is, if it is there; refuses what could not be written later."""
        try:
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if self.path.exists() and self.path.stat().st_size and not self._overwrite:
                self._check_settings()
            elif self._writes:
                _check_writable(self._settings_path)
            if not self.path.exists():
                return None
            return open(self.path, "r+b" if self._writes else "rb")  # `close` closes it
        except OSError as error:
            raise self._unwritable(error) from None

    def _begin(self) -> None:
        """Cuts off what is not to stay; of a new file also the settings. An empty file is of any settings."""
        assert self._begins_at is not None, "go_on says where"
        try:
            if self._stream is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._stream = open(self.path, "w+b")  # noqa: SIM115
            self._stream.seek(self._begins_at)
            self._stream.truncate()
            if self._begins_at == 0:
                self._settings_path.write_text(json.dumps(self._settings, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from None
        self._begins_at, self._has_begun = None, True

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"--results-path {self.path}: {error.strerror}; name a file that can be written")

    def old_blocks(self, size: int) -> Iterator[list[OldRecord]]:
        """The records of earlier runs, `size` at a time; the last block may have fewer.

        Samples of one block are answered together, and their neighbours may show in the last digits of a number.
        A block that was begun and not completed is therefore best begun anew: see `go_on`.
        """
        records: list[OldRecord] = []
        self._ends = {0: 0}
        if self._overwrite or self._stream is None:
            return
        number = 0
        for end, record in self._json_records(self._stream) if self.as_json else self._text_records(self._stream):
            records.append(record)
            number += 1
            if len(records) == size:
                self._ends = {number: end}
                yield records
                records = []
            last = end
        if records:
            self._ends[number] = last
            yield records

    def go_on(self, number: int) -> None:
        """What comes is written behind the first `number` records: all, or those of complete blocks."""
        if self.world is not None:
            self.world.barrier()  # all have read what is there
        self._begins_at = self._ends[number]

    def write(self, lines: Iterable[str]) -> None:
        """Complete records; they are in the file, for any reader, when this returns."""
        if not self._writes:
            return
        if self._begins_at is not None:
            self._begin()
        assert self._stream is not None, "go_on has been called"
        self._stream.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
        self._stream.flush()

    @property
    def is_ours(self) -> bool:
        """Whether what is on the disk is of this command: gone on with, or begun by a `write`."""
        return self._has_begun or (self._stream is not None and not self._overwrite)

    def close(self) -> None:
        """Nothing is written any more."""
        if self._stream is not None:
            self._stream.close()

    def same_source(self, recorded: str, source: str) -> bool:
        """Whether a record with the source `recorded` is of this source."""
        return recorded == (source if self.as_json else one_line(source))

    def _check_settings(self) -> None:
        """Refuses to go on with results of another command."""
        remedy = "give another --results-path, or --overwrite-results to begin anew"
        try:
            old = dict(json.loads(self._settings_path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise UserError(f"{self.path} is there, but no {self._settings_path.name} beside it; {remedy}") from None
        except (ValueError, TypeError):
            raise UserError(f"{self._settings_path} is damaged; {remedy}") from None
        names = [*self._settings, *(name for name in old if name not in self._settings)]
        changes = [
            f"{name} was {old.get(name)!r} and is {self._settings.get(name)!r}"
            for name in names
            if old.get(name) != self._settings.get(name)
        ]
        if changes:
            raise UserError(f"{self.path} was begun with other settings: {', '.join(changes)}; {remedy}")

    def _json_records(self, stream: BinaryIO) -> Iterator[tuple[int, OldRecord]]:
        """Records with the byte behind each."""
        end = 0
        for number, line in enumerate(stream):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                record = json.loads(line)
                if record["id"] != number:
                    raise ValueError
                answers = [
                    (answer["text"], answer["reference"])
                    for answer in record.get("answers", ())
                    if "reference" in answer
                ]
                yield end, OldRecord(None if "error" in record else record["source"], answers, _likeliest(record))
            except (ValueError, KeyError, TypeError, IndexError):
                raise self._foreign(number + 1, f"the record of sample {number}") from None

    def _text_records(self, stream: BinaryIO) -> Iterator[tuple[int, OldRecord]]:
        """Records with the byte behind each: E- is one alone, S- begins one and F-, or the next, ends it."""
        number = end = position = 0
        source: str | None = None  # of a record that has begun
        for line_number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            kind = line[:2]
            if source is not None and kind in (b"S-", b"E-"):
                yield end, OldRecord(source)
                number, source = number + 1, None
            name, _, rest = line.decode("utf-8", errors="replace").partition("\t")
            if name[2:] != str(number) or (source is None) != (kind in (b"S-", b"E-")):
                raise self._foreign(line_number, f"a line of sample {number}")
            position += len(line)
            end = position
            if kind == b"S-":
                source = rest.rstrip("\n")
            elif kind in (b"E-", b"F-"):
                yield end, OldRecord(source)
                number, source = number + 1, None

    def _foreign(self, line_number: int, expected: str) -> UserError:
        return UserError(
            f"{self.path}:{line_number} is not {expected}; "
            "give another --results-path, or --overwrite-results to begin anew"
        )


def earlier_records(results: ResultsFile, size: int, num_samples: int, limit: int | None = None) -> Iterator[OldRecord]:
    """The records of earlier runs, of the first `limit` samples at most, behind which the results go on.

    A block of `size` samples that was begun and not completed is begun anew. Where all are there that are asked for,
    nothing is to be written, and more that an earlier run has added stay.

    Raises:
        UserError: there are more records than samples.
    """
    done, count = 0, min(num_samples, limit or num_samples)
    for records in results.old_blocks(size):
        if done + len(records) > num_samples:
            raise UserError(
                f"{results.path} holds more samples than the split, which has {num_samples}; was the data changed?"
            )
        if done + len(records) >= count:
            yield from records[: count - done]
            return
        if len(records) < size:
            break
        done += len(records)
        yield from records
    results.go_on(done)


def _likeliest(record: dict[str, Any]) -> tuple[float, int] | None:
    """Of a record with scored candidates the sum of the best one, and how many tokens that has."""
    if "candidates" not in record:
        return None
    best = record["candidates"][record["best"]]
    return float(best["logprob"]), sum(len(answer["token_logprobs"]) for answer in best["answers"])


def checkpoint_identity(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Which checkpoints these are, for the settings of results: folders, and digests of their contents."""
    from ftk.checkpoint.layout import MANIFEST

    digests = [hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest() for folder in folders]
    return {"checkpoint": [os.fspath(folder) for folder in folders], "checkpoint_digest": digests}


def _check_writable(file: Path) -> None:
    """Raises OSError if a file, which may have to be made, folder and all, cannot be written."""
    place = file.absolute()
    while not place.exists():
        place = place.parent
    if place != file.absolute() and not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
