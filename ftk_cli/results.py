"""--results-path: answers go to a file record by record, and the same command continues where a run stopped."""

from __future__ import annotations

import dataclasses
import errno
import io
import itertools
import json
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.builtins import FORMER_NAMES
from ftk.errors import UserError
from ftk.files import MAX_JSON_BYTES, open_regular, open_to_write, read_json, reason, write_whole
from ftk.generation.config_groups import BatchConfig
from ftk.parsing import parse_json

if TYPE_CHECKING:
    from ftk.model_parallel.world import World
    from ftk_cli.generate_options import GenerateRoot
    from ftk_cli.inference_options import Checkpoints
    from ftk_cli.prompts import Source, T

SETTINGS_SUFFIX = ".settings.json"
"""Suffix of the file that records the command of the results."""

RETIRED = {"contrastive_alpha": 0.6, "contrastive_candidates": 4, "in_flight": True}
"""Settings that are gone, with the defaults that they had: older files name them."""

_MAX_SETTINGS_BYTES = 1 << 24
_DECIDING = ("gen_subset", "output_format", "print_step", "score_reference", "score_end")
_LONGEST_VALUE = 300  # characters of a setting in a message


@dataclass(frozen=True)
class OldRecord:
    """A complete record of an earlier run.

    Attributes:
        source: as the record holds it; None where the sample could not be answered.
        answers: text and reference of each answer, where the record has references.
        likeliest: log-probability and tokens of the likeliest of the answers that were given, in JSON.
    """

    source: str | None
    answers: list[tuple[str, str]] = field(default_factory=list)
    likeliest: tuple[float, int] | None = None


class ResultsFile:
    """A file of results, open for further records.

        results = ResultsFile("out.jsonl", settings, overwrite=False, world=world)
        for record in results.earlier(source, 64): ...
        results.write(lines)

    Next to it is FILE.settings.json with the settings. Records are JSON Lines, complete samples in input order; a
    record that an interruption has cut does not count.

    Nothing on the disk changes before the first `write`: no old file is emptied, no new one made.

    Args:
        path: the file; its folder is made.
        settings: everything that decides the answers; JSON.
        overwrite: whether to start over where the file is there already.
        world: all ranks make such an object and read what is there; the main one writes.

    Raises:
        UserError: the file is of other settings, or of none, or cannot be written.
    """

    def __init__(self, path: str, settings: dict[str, Any], *, overwrite: bool, world: World) -> None:
        from ftk.model_parallel.collective import collective

        self.path, self.world = Path(path), world
        self._real_path = os.path.realpath(path)  # a link that the user names is followed
        self._settings_path = Path(f"{self.path}{SETTINGS_SUFFIX}")
        self._settings = json.loads(json.dumps(settings))
        self._overwrite = overwrite
        self._begins_at: int | None = None  # the byte where the first `write` goes
        self._has_begun = False  # there was a `write`
        self._stream = collective(world, self._open)

    def _open(self) -> io.FileIO | None:
        """The existing file, if any; refuses what could not be written later."""
        try:
            if not os.path.lexists(self._real_path):
                if self.world.is_main:
                    _check_writable(Path(self._real_path))
                    _check_writable(self._settings_path)
                return None
            # `close` closes it.
            stream = open_to_write(self._real_path) if self.world.is_main else open_regular(self._real_path)
            try:
                if os.fstat(stream.fileno()).st_size and not self._overwrite:
                    self._check_settings()
                elif self.world.is_main:
                    _check_writable(self._settings_path)
            except BaseException:
                stream.close()
                raise
            return stream
        except OSError as error:
            raise self._unwritable(error) from None

    def _begin(self) -> None:
        """Cuts off records that will be replaced; writes the settings of a new or emptied file."""
        assert self._begins_at is not None, "earlier says where"
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

    def earlier(self, source: Source[T], size: int) -> Iterator[OldRecord]:
        """The records of earlier runs, whose items are taken from the source; new results follow them.

        Samples of one block are answered together, and their neighbours may show in the last digits of a number: an
        incomplete block of `size` is answered again. If all requested samples are there, nothing is written, and
        further answers of an earlier run stay.

        Args:
            source: of what was asked, from its beginning on.
            size: items that are answered together.

        Yields:
            the records that stay.

        Raises:
            UserError: the records are of another input.
        """
        end = 0
        with closing(self._records()) as old_records:
            while True:
                wanted = size if source.limit is None else min(size, source.limit - source.done)
                found = list(itertools.islice(old_records, wanted))
                items = source.take(len(found))
                if len(items) < len(found):
                    raise UserError(f"{self.path} holds more samples than {source.name} has; was the input changed?")
                for (index, item), (_, old) in zip(items, found, strict=True):
                    if old.source is not None and not _is_of(source, item, old.source):
                        raise UserError(
                            f"{source.name}:{index + 1} is not the prompt that {self.path} holds there; "
                            "give the same input, another --results-path, or --overwrite-results to start over"
                        )
                all_there = source.done + len(found) == source.limit
                following = source.take(1) if found and len(found) < size and not all_there else []
                if following or not found:
                    source.put_back([*items, *following])
                    break
                source.done, end = source.done + len(found), found[-1][0]
                for _, old in found:
                    source.failed += old.source is None
                    yield old
                if all_there:
                    return
        self.world.barrier()  # all have read what is there
        self._begins_at = end

    def write(self, lines: Iterable[str]) -> None:
        """Complete records; they are in the file, for any reader, when this returns.

        Raises:
            UserError: the file cannot be begun.
            OSError: the disk is full or the like; complete records that are in the file stay.
        """
        if not self.world.is_main:
            return
        if self._begins_at is not None:
            self._begin()
        assert self._stream is not None, "earlier has been called"
        rest = memoryview("".join(f"{line}\n" for line in lines).encode("utf-8"))
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(self.path)) from error

    @property
    def is_ours(self) -> bool:
        """Whether what is on the disk is of this command: continued, or begun by a `write`."""
        return self._has_begun or (self._stream is not None and not self._overwrite)

    def close(self) -> None:
        """Nothing is written any more."""
        if self._stream is not None:
            self._stream.close()

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
        old = {FORMER_NAMES["option"].get(name, name): value for name, value in old.items()}
        gone = [name for name in old if name not in self._settings]
        names = [*self._settings, *(name for name in gone if name not in RETIRED or old[name] != RETIRED[name])]
        changes = [
            f"{name[:_LONGEST_VALUE]} was {_shown(old.get(name))} and is {_shown(self._settings.get(name))}"
            for name in names
            if old.get(name) != self._settings.get(name)
        ]
        if changes:
            raise UserError(f"{self.path} was begun with other settings: {', '.join(changes)}; {remedy}")

    def _records(self) -> Generator[tuple[int, OldRecord], None, None]:
        """Complete records, each with the byte after it; a record cut by an interruption is not complete."""
        if self._overwrite or self._stream is None:
            return
        self._stream.seek(0)
        end = 0
        with open(self._stream.fileno(), "rb", closefd=False) as reader:
            for number in itertools.count():
                line = reader.readline(MAX_JSON_BYTES)
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                try:
                    record = _old_record(parse_json(line), number)
                except (ValueError, LookupError, TypeError, ArithmeticError):
                    raise UserError(
                        f"{self.path}:{number + 1} is not the record of sample {number}; "
                        "give another --results-path, or --overwrite-results to start over"
                    ) from None
                yield end, record


def _is_of(source: Source[T], item: T, recorded: str) -> bool:
    try:
        return source.prompt(item) in (None, recorded)
    except UserError:  # what cannot be read was not answered
        return False


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


def settings_of(root: GenerateRoot, checkpoints: Checkpoints) -> dict[str, Any]:
    """Everything that decides the answers of a command: its options, and folders and contents of its checkpoints."""
    from ftk.checkpoint import read_config
    from ftk.checkpoint.quantize import quantization_of
    from ftk.checkpoint.weights import digest

    options, settings = root.generate, dataclasses.asdict(root.generation)
    settings.pop("lm_path", None)  # its identity is more precise
    rounded = root.common.precision != "fp32"
    for prefix, folders in (("", checkpoints.model), ("lm_", checkpoints.language_model)):
        if folders is not None:
            settings[f"{prefix}checkpoint"] = [os.fspath(folder) for folder in folders]
            settings[f"{prefix}checkpoint_digest"] = list(map(digest, folders))
            rounded = rounded or any(quantization_of(read_config(folder)) is not None for folder in folders)
    if checkpoints.adapter is not None:
        settings |= {"adapter": os.fspath(checkpoints.adapter), "adapter_digest": digest(checkpoints.adapter)}
    if not rounded:
        for only_speed in dataclasses.fields(BatchConfig):  # no answer depends on it
            del settings[only_speed.name]
    return {
        **{name: getattr(options, name) for name in _DECIDING},
        "input_format": options.line_format(),
        **{name: path and os.path.abspath(path) for name, path in (("data", options.data), ("input", options.input))},
        "ema": root.common.ema,
        "precision": root.common.precision,
        **settings,
        **dataclasses.asdict(root.processors),
    }


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
