"""Prompts from a file or a pipe, one per line: read in constant memory, without those that are answered already."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ftk.errors import UserError
from ftk_cli.inference_options import decode_line
from ftk_cli.progress import chunks

if TYPE_CHECKING:
    from ftk_cli.results import OldRecord, ResultsFile

_ENDLESS_BYTES = 1 << 28
_MAX_LINE_BYTES = 1 << 20  # a longer line is no prompt; it is not even read whole


def input_name(source: str) -> str:
    """What a file, or "-", is called in messages."""
    return "standard input" if source == "-" else source


def open_input(source: str) -> Any:
    """The prompts as a stream of bytes, a context manager."""
    if source == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return open(source, "rb")
    except OSError as error:
        raise UserError(f"--input {source}: {error.strerror}; give a text file or -") from None


def prompt_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Lines, of which no more than one byte beyond the limit is kept.

    Raises:
        UserError: a line does not come to an end, as in a device.
    """
    for number in itertools.count(1):
        line = rest = stream.readline(_MAX_LINE_BYTES + 1)
        if not line:
            return
        passed = len(line)
        while len(rest) > _MAX_LINE_BYTES and not rest.endswith(b"\n"):
            if passed > _ENDLESS_BYTES:
                raise UserError(f"{name}:{number}: no line end within {_ENDLESS_BYTES} bytes; give a text file")
            rest = stream.readline(_MAX_LINE_BYTES + 1)
            passed += len(rest)
        yield line


def num_prompts(source: str, limit: int | None) -> int | None:
    """How many prompts will come, for the time left; None where only their end will tell."""
    if not os.path.isfile(source) or not sys.stderr.isatty():
        return limit
    with open(source, "rb") as stream:
        return sum(1 for _ in itertools.islice(prompt_lines(stream, source), limit))


def line_text(line: bytes) -> str:
    """The text of a line, without its end.

    Raises:
        UserError: it is too long, or not UTF-8.
    """
    if len(line) > _MAX_LINE_BYTES:
        raise UserError(f"the line is longer than {_MAX_LINE_BYTES} bytes; no model reads that much, shorten it")
    return decode_line(line).rstrip("\r\n")


class AskedPrompt(NamedTuple):
    """A prompt, and the options that it brings along (`ftk.generation.processors.steering.PROMPT_OPTIONS`)."""

    prompt: str
    options: dict[str, Any]


def parse_prompt(line: str, input_format: str) -> AskedPrompt:
    """What a line of the input asks for.

    Args:
        line: its text, without its end.
        input_format: "text": the prompt; "tabs": the prompt and phrases that its answers must hold, with tabs between,
            as fairseq-interactive reads them; "json": an object with `prompt`, or `text`, and options.

    Raises:
        UserError: it is no such object. The options themselves are checked where they are used.
    """
    if input_format == "text":
        return AskedPrompt(line, {})
    if input_format == "tabs":
        prompt, *phrases = line.split("\t")
        constraints = [phrase for phrase in phrases if phrase.strip()]
        return AskedPrompt(prompt, {"constraints": constraints} if constraints else {})
    record = parse_object(line, "{'prompt': 'the [MASK] fox', 'constraints': ['quick']}".replace("'", '"'))
    names = [name for name in ("prompt", "text") if name in record]
    if len(names) != 1 or not isinstance(record[names[0]], str):
        raise UserError("a JSON line needs a text 'prompt' (or 'text', but not both)")
    return AskedPrompt(record.pop(names[0]), record)


def prompt_of(line: str, input_format: str) -> str:
    """The prompt alone."""
    return parse_prompt(line, input_format).prompt


def parse_object(line: str, example: str) -> dict[str, Any]:
    """A line that must be a JSON object.

    Raises:
        UserError: it is none, names a key twice, or holds what is no text.
    """
    if not line.strip():
        raise UserError(f"the line is empty; write a JSON object, e.g. {example}")
    try:
        record = json.loads(line, object_pairs_hook=_once)
        text = json.dumps(record, ensure_ascii=False)
    except RecursionError:
        raise UserError("not a JSON object: brackets stand in each other too deeply") from None
    except ValueError as error:
        raise UserError(f"not a JSON object: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"not a JSON object, but a {type(record).__name__}; e.g. {example}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("a \\u escape stands for half a character (a surrogate without its other half)") from None
    return record


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise UserError(f"the key {name!r} stands there twice")
        found[name] = value
    return found


class Lines:
    """The lines of an input with their numbers, those that earlier runs have answered left out.

    Args:
        stream: of bytes.
        name: of the input.
        limit: read no more lines; all if None.
    """

    def __init__(self, stream: BinaryIO, name: str, limit: int | None) -> None:
        self.name, self.limit = name, limit
        self.done = self.failed = 0  # in earlier runs
        self._lines: Iterator[tuple[int, bytes]] = enumerate(itertools.islice(prompt_lines(stream, name), limit))

    def pass_over(self, results: ResultsFile, size: int, source_of: Callable[[str], str]) -> Iterator[OldRecord]:
        """Reads the records of earlier runs, and the input lines that they answer; new results follow them.

        An incomplete block of `size` lines is answered again. If all requested lines are answered,
        nothing is written, and further answers of an earlier run stay.

        Args:
            results: a file that was just opened.
            size: lines that are answered together.
            source_of: from the text of a line to its prompt, as a record shows it.

        Yields:
            the records that stay.

        Raises:
            UserError: the records are of other lines.
        """
        for found in results.old_blocks(size):
            records = found if self.limit is None else found[: self.limit - self.done]
            lines = list(itertools.islice(self._lines, len(records)))
            if len(lines) < len(records):
                raise UserError(f"{results.path} holds more samples than {self.name} has lines; was the input changed?")
            for (index, line), old in zip(lines, records, strict=True):
                if old.source is not None and not _is_of(results, old.source, line, source_of):
                    raise UserError(
                        f"{self.name}:{index + 1} is not the prompt that {results.path} holds there; "
                        "give the same input, another --results-path, or --overwrite-results to start over"
                    )
            all_there = self.done + len(records) == self.limit
            following = next(self._lines, None) if len(records) < size and not all_there else None
            if following is not None:
                self._lines = itertools.chain(lines, [following], self._lines)
                break
            self.done += len(records)
            self.failed += sum(old.source is None for old in records)
            yield from records
            if all_there:
                return
        results.go_on(self.done)

    def blocks(self, size: int) -> Iterator[list[tuple[int, bytes]]]:
        """`size` lines at a time with their numbers from 0 on."""
        return chunks(self._lines, size)


def _is_of(results: ResultsFile, source: str, line: bytes, source_of: Callable[[str], str]) -> bool:
    try:
        return results.same_source(source, source_of(line_text(line)))
    except UserError:  # what cannot be read was not answered
        return False
