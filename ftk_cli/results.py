"""--results-path: answers go to a file record by record, and the same command continues where a run stopped."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.errors import UserError
from ftk.files import MAX_JSON_BYTES, open_regular, open_to_write, parse_json, read_json, reason, write_whole
from ftk_cli.answer_lines import one_line

if TYPE_CHECKING:
    from ftk.model_parallel.world import World

SETTINGS_SUFFIX = ".settings.json"
"""Suffix of the file that records the command of the results."""

_MAX_SETTINGS_BYTES = 1 << 24
_LONGEST_VALUE = 300  # characters of a setting in a message


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

    Next to it is FILE.settings.json with the settings. Records are complete samples in input order; what an
    interruption has cut does not count, in text also the last sample of DATA, whose end cannot be seen.

    Nothing on the disk changes before the first `write`: neither is an old file emptied, nor a new one made.

    Args:
        path: the file; its folder is made.
        settings: whatever decides the answers; JSON.
        as_json: whether the records are JSON lines, else text.
        overwrite: whether to start over if the file exists already.
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
        self._real_path = os.path.realpath(path)  # a link that the user names is followed
        self._settings_path = Path(f"{self.path}{SETTINGS_SUFFIX}")
        self._settings = json.loads(json.dumps(settings))
        self._overwrite = overwrite
        self._ends: dict[int, int] = {}  # number of records -> byte behind them, where `go_on` may begin
        self._begins_at: int | None = None  # the byte where the first `write` goes
        self._has_begun = False  # there was a `write`
        self._writes = world is None or world.is_main
        if world is None:
            self._stream = self._open()
        else:
            from ftk.model_parallel.collective import collective

            self._stream = collective(world, self._open)

    def _open(self) -> io.FileIO | None:
        """The existing file, if any; refuses what could not be written later."""
        try:
            if not os.path.lexists(self._real_path):
                if self._writes:
                    _check_writable(Path(self._real_path))
                    _check_writable(self._settings_path)
                return None
            # `close` closes it.
            stream = open_to_write(self._real_path) if self._writes else open_regular(self._real_path)
            try:
                if os.fstat(stream.fileno()).st_size and not self._overwrite:
                    self._check_settings()
                elif self._writes:
                    _check_writable(self._settings_path)
            except BaseException:
                stream.close()
                raise
            return stream
        except OSError as error:
            raise self._unwritable(error) from None

    def _begin(self) -> None:
        """Cuts off what is not to stay; of a new file also the settings. An empty file is of any settings."""
        assert self._begins_at is not None, "go_on sets it"
        try:
            if self._stream is None:
                Path(self._real_path).parent.mkdir(parents=True, exist_ok=True)
                self._settings_path.parent.mkdir(parents=True, exist_ok=True)
                self._stream = open_to_write(self._real_path)
            self._stream.seek(self._begins_at)
            self._stream.truncate()
            if self._begins_at == 0:
                write_whole(self._settings_path, json.dumps(self._settings, indent=1) + "\n")
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
        self._stream.seek(0)
        for end, record in self._json_records() if self.as_json else self._text_records():
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
        """Complete records; they are in the file, for any reader, when this returns.

        Raises:
            UserError: the file cannot be begun.
            OSError: the disk is full or the like; complete records that are in the file stay.
        """
        if not self._writes:
            return
        if self._begins_at is not None:
            self._begin()
        assert self._stream is not None, "go_on has been called"
        rest = memoryview("".join(f"{line}\n" for line in lines).encode("utf-8"))
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(self.path)) from error

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
        """Refuses to continue results of another command."""
        remedy = "give another --results-path, or --overwrite-results to start over"
        try:
            old = read_json(self._settings_path, _MAX_SETTINGS_BYTES)
            if not isinstance(old, dict):
                raise ValueError("is no JSON object")
        except FileNotFoundError:
            raise UserError(f"{self.path} exists without {self._settings_path.name}; {remedy}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{self._settings_path} {reason(error)}; {remedy}") from None
        names = [*self._settings, *(name for name in old if name not in self._settings)]
        changes = [
            f"{name[:_LONGEST_VALUE]} was {_shown(old.get(name))} and is {_shown(self._settings.get(name))}"
            for name in names
            if old.get(name) != self._settings.get(name)
        ]
        if changes:
            raise UserError(f"{self.path} was begun with other settings: {', '.join(changes)}; {remedy}")

    def _complete_lines(self) -> Iterator[bytes]:
        """The lines of the file; what an interruption has cut is none."""
        assert self._stream is not None, "the caller has looked"
        reader = io.BufferedReader(self._stream)  # type: ignore[type-var]
        try:
            while (line := reader.readline(MAX_JSON_BYTES)).endswith(b"\n"):
                yield line
        finally:
            reader.detach()  # the file stays open

    def _json_records(self) -> Iterator[tuple[int, OldRecord]]:
        """Records with the byte behind each."""
        end = 0
        for number, line in enumerate(self._complete_lines()):
            end += len(line)
            try:
                record = _old_record(parse_json(line), number)
            except (ValueError, LookupError, TypeError, ArithmeticError):
                raise self._foreign(number + 1, f"the record of sample {number}") from None
            yield end, record

    def _text_records(self) -> Iterator[tuple[int, OldRecord]]:
        """Records with the byte behind each: E- is one alone, S- begins one and F-, or the next, ends it."""
        number = end = position = 0
        source: str | None = None  # of a record that has begun
        for line_number, line in enumerate(self._complete_lines(), start=1):
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
            "give another --results-path, or --overwrite-results to start over"
        )


def earlier_records(results: ResultsFile, size: int, num_samples: int, limit: int | None = None) -> Iterator[OldRecord]:
    """The records of earlier runs, of the first `limit` samples at most; new results follow them.

    An incomplete block of `size` samples is answered again. If all requested samples are there,
    nothing is written, and further ones of an earlier run stay.

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


def _old_record(record: Any, number: int) -> OldRecord:
    """A record from its JSON; what is none raises ValueError, LookupError, TypeError or ArithmeticError."""
    if record["id"] != number:
        raise ValueError
    answers = [(answer["text"], answer["reference"]) for answer in record.get("answers", ()) if "reference" in answer]
    source = None if "error" in record else record["source"]
    if not all(isinstance(text, str) for text in (source or "", *(text for pair in answers for text in pair))):
        raise TypeError
    return OldRecord(source, answers, _likeliest(record))


def _shown(value: Any) -> str:
    """A setting in a message."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


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
    if place == file.absolute() and not place.is_file():
        raise OSError(errno.EINVAL, "is no regular file")
    if place != file.absolute() and not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
