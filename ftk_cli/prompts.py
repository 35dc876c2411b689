"""Prompts: lines of a file or a pipe, of which few are in memory at a time, or samples of a split."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, TypeVar

from ftk.errors import UserError, counted, with_flags
from ftk.parsing import how_to_convert, strict_object

if TYPE_CHECKING:
    from ftk.data.sample_dataset import SampleDataset
    from ftk.generation.results import EncodedText
    from ftk.generation.text import TextGenerator
    from ftk.model_parallel.world import World
    from ftk_cli.generate_options import GenerateConfig
    from ftk_cli.inference_options import Checkpoints

T = TypeVar("T")

EPOCH = 1  # whose samples validation looks at, too

_ENDLESS_BYTES = 1 << 28
_MAX_LINE_BYTES = 1 << 20  # a longer line is no prompt; it is not even read whole
_LONGEST_MESSAGE = 1000  # characters
_SHOWN_REFUSALS = 5  # with messages that are equal but for numbers and quotations


class Source(ABC, Generic[T]):
    """Items with their numbers, those that earlier runs have answered left out.

    Attributes:
        name, unit: of the input and of one item, in messages.
        limit: number of items to answer; None: all.
        done, failed: of earlier runs.
    """

    name: str
    unit: str

    def __init__(self, items: Iterator[T], limit: int | None) -> None:
        self.limit = limit
        self.done = self.failed = 0
        self._items: Iterator[tuple[int, T]] = enumerate(itertools.islice(items, limit))

    def take(self, count: int) -> list[tuple[int, T]]:
        """The next `count` items with their numbers from 0 on, fewer at the end."""
        return list(itertools.islice(self._items, count))

    def put_back(self, items: list[tuple[int, T]]) -> None:
        """`take` gives these items again."""
        self._items = itertools.chain(items, self._items)

    def blocks(self, size: int) -> Iterator[list[tuple[int, T]]]:
        """`size` items at a time."""
        while block := self.take(size):
            yield block

    def total(self) -> int | None:
        """The number of items, for the time left; None if it is not known."""
        return self.limit

    def prompt(self, item: T) -> str | None:
        """The prompt of an item as a record shows it; None where it is not compared. UserError: it has none."""
        return None

    @abstractmethod
    def read(self, item: T, generator: TextGenerator) -> EncodedText:
        """An item as the model reads it. UserError: it cannot be answered."""


class Samples(Source[int]):
    """The samples of a split, as validation sees them."""

    unit = "sample"

    def __init__(self, samples: SampleDataset, split: str, limit: int | None) -> None:
        questions: Sequence[Any] | None = getattr(samples, "questions", None)
        self.count = len(samples if questions is None else questions)
        self._sample = functools.partial(samples.sample, EPOCH) if questions is None else questions.__getitem__
        super().__init__(iter(range(self.count)), limit)
        self.name = f"the split {split}"

    def total(self) -> int:
        count = self.count
        return max(self.done, count if self.limit is None else min(count, self.limit))

    def read(self, item: int, generator: TextGenerator) -> EncodedText:
        return generator.encode_sample(self._sample(item))


class Lines(Source[bytes]):
    """The lines of an input, each a prompt.

    Args:
        options: of the command: input, its format, and whether answers are given.
        stream: the input.
    """

    unit = "prompt"

    def __init__(self, options: GenerateConfig, stream: BinaryIO) -> None:
        self.options, self.path = options, str(options.input)
        self.name = "standard input" if self.path == "-" else self.path
        super().__init__(prompt_lines(stream, self.name), options.max_samples)

    def total(self) -> int | None:
        if not os.path.isfile(self.path) or not sys.stderr.isatty():
            return self.limit
        with open(self.path, "rb") as stream:
            return sum(1 for _ in itertools.islice(prompt_lines(stream, self.path), self.limit))

    def prompt(self, item: bytes) -> str:
        line = line_text(item)
        if self.options.score_reference:
            return parse_candidates(line)[0]
        return parse_prompt(line, self.options.line_format())[0]

    def read(self, item: bytes, generator: TextGenerator) -> EncodedText:
        line = line_text(item)
        if self.options.score_reference:
            prompt, candidates = parse_candidates(line, generator.example)
            return generator.encode_candidates(prompt, candidates, self.options.score_end)
        prompt, own = parse_prompt(line, self.options.line_format(), generator.example)
        return generator.encode(prompt, own)


@contextmanager
def open_source(options: GenerateConfig, checkpoints: Checkpoints, world: World) -> Iterator[Source[Any]]:
    """What a command asks: its lines, or the samples of its data, made by the task of the first checkpoint, or of
    its separate adapter.

    Raises:
        UserError: there is no such input, or no such split.
    """
    if options.input == "-":
        yield Lines(options, sys.stdin.buffer)
        return
    if options.input is not None:
        try:
            stream = open(options.input, "rb")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"--input {options.input}: {error.strerror}; give a text file or -") from None
        with stream:
            yield Lines(options, stream)
        return
    assert options.data is not None, "validated"
    from ftk.tasks.contract import load_samples
    from ftk.tasks.data_facts import check_same_data
    from ftk.tasks.restore import restore_task

    first = checkpoints.model[0]
    try:
        task, _ = restore_task(first, options.data, adapter=checkpoints.adapter)
    except UserError as error:
        if os.path.exists(options.data):
            raise
        raise UserError(f"{error}; prompts are given by --input FILE (- for standard input)") from error
    if task.generates_as_usual:
        raise UserError(
            f"{checkpoints.adapter or first} was trained for {type(task).__name__}, whose samples are no prompts; give "
            f"texts by --input, or measure it on {options.data} by ftk-validate"
        )
    check_same_data(task, [options.subset], world)
    yield Samples(load_samples(task, options.subset), options.subset, options.max_samples)


class Remarks:
    """Counts prompts that may contain a mistake, and lines that cannot be answered."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], int] = {}
        self._refused: Counter[str] = Counter()
        self._first_refused: dict[str, int] = {}

    def refuse(self, index: int, message: str) -> bool:
        """A line without an answer, by its number; whether to say why: of the first few with such a message."""
        kind = re.sub(r"\d+|'[^']*'", "", message)
        self._refused[kind] += 1
        self._first_refused.setdefault(kind, index)
        return self._refused[kind] <= _SHOWN_REFUSALS

    def count(self, index: int, prompt: EncodedText) -> None:
        """A prompt, as the model reads it, and the number of its line from 0 on."""
        if prompt.remark is not None:
            self._counts[prompt.remark] += 1
            self._first.setdefault(prompt.remark, index)

    def lines(self) -> Iterator[str]:
        """Messages about them; those about refused lines only where some were not said."""
        for kind, count in self._refused.items():
            if count > _SHOWN_REFUSALS:
                more = counted(count - _SHOWN_REFUSALS, "more line")
                yield f"{more} with the error of line {self._first_refused[kind] + 1}"
        for (of_one, of_several), count in self._counts.items():
            first = self._first[of_one, of_several] + 1
            if count == 1:
                yield f"1 prompt {of_one}: line {first}"
            else:
                yield f"{count} prompts {of_several}; the first is line {first}"


def prompt_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Lines, of which no more than one byte beyond the limit is kept.

    Raises:
        UserError: a line has no end, as in a device.
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


def line_text(line: bytes) -> str:
    """The text of a line, without its end.

    Raises:
        UserError: it is too long, or not UTF-8.
    """
    if len(line) > _MAX_LINE_BYTES:
        raise UserError(f"the line is longer than {_MAX_LINE_BYTES} bytes; no model reads that much, shorten it")
    try:
        return line.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
    except UnicodeDecodeError as error:
        place = f"not UTF-8 at byte {error.start + 1} of the line"
        raise UserError(f"{place}; convert the file to UTF-8, {how_to_convert(line)}") from None


def refusal(error: UserError) -> str:
    """What is wrong with a line; of the line itself no more than a few hundred characters are repeated."""
    message = with_flags(str(error))
    if len(message) <= _LONGEST_MESSAGE:
        return message
    return f"{message[: _LONGEST_MESSAGE // 2]} … {message[-_LONGEST_MESSAGE // 2 :]}"


def parse_prompt(line: str, input_format: str, example: str = "...") -> tuple[str, dict[str, Any]]:
    """The prompt of a line, and the options that it brings along (`ftk.generation.processors.steering.PROMPT_OPTIONS`).

    Args:
        line: its text, without its end.
        input_format: "text": the prompt; "tabs": the prompt and phrases that its answers must hold, with tabs between,
            as fairseq-interactive reads them; "json": an object with `prompt`, `text`, or `messages` of a conversation,
            whose last one is the prompt, and options.
        example: a prompt, for messages.

    Raises:
        UserError: it is no such object. The options themselves are checked where they are used.
    """
    if input_format == "text":
        return line, {}
    if input_format == "tabs":
        prompt, *phrases = line.split("\t")
        constraints = [phrase for phrase in phrases if phrase.strip()]
        return prompt, {"constraints": constraints} if constraints else {}
    record = _parse_object(line, json.dumps({"prompt": example, "constraints": ["quick"]}))
    names = [name for name in ("prompt", "text", "messages") if name in record]
    if names == ["messages"]:
        return _last_message(record.pop("messages"), record)
    if len(names) != 1 or not isinstance(record[names[0]], str):
        raise UserError("a JSON line needs a text 'prompt' (or 'text', but not both), or 'messages' of a conversation")
    return record.pop(names[0]), record


def _last_message(messages: Any, own: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of a conversation's last message, and the options with those before it."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "user" or not isinstance(last.get("content"), str):
        raise UserError("'messages' must be a list whose last one has the role 'user' and a text 'content'")
    return last["content"], own | {"messages": messages[:-1]}


def parse_candidates(line: str, example: str = "...") -> tuple[str, list[list[str]]]:
    """The prompt of a line, and its candidates, each a list of answers.

    Args:
        line: prompt and answers with tabs between, or a JSON object with `prompt` and either `answers` or `candidates`
            (a list of such lists, or of texts where there is one answer).
        example: a prompt, for messages.

    Raises:
        UserError: it is neither.
    """
    if not line.lstrip().startswith("{"):
        prompt, *answers = line.split("\t")
        if not answers:
            raise UserError("there is no answer; write prompt, tab, answer (several with tabs between), or JSON")
        return prompt, [answers]
    record = _parse_object(line, json.dumps({"prompt": example, "answers": ["quick"]}))
    asked = record.get("prompt")
    given = [key for key in ("answers", "candidates") if key in record]
    if not isinstance(asked, str) or len(given) != 1:
        raise UserError("a JSON line needs a text 'prompt', and either 'answers' or 'candidates'")
    candidates: Any = [record["answers"]] if given == ["answers"] else record["candidates"]
    if isinstance(candidates, list):
        candidates = [[candidate] if isinstance(candidate, str) else candidate for candidate in candidates]
    if (
        not isinstance(candidates, list)
        or not candidates
        or not all(isinstance(own, list) and all(isinstance(answer, str) for answer in own) for own in candidates)
    ):
        also = ", or a list of such lists" if given == ["candidates"] else ""
        raise UserError(f"{given[0]!r} must be a list of texts{also}")
    return asked, candidates


def _parse_object(line: str, example: str) -> dict[str, Any]:
    """A line that must be a JSON object.

    Raises:
        UserError: it is none, names a key twice, or holds what is no text.
    """
    if not line.strip():
        raise UserError(f"the line is empty; write a JSON object, e.g. {example}")
    try:
        return strict_object(line)
    except ValueError as error:
        raise UserError(f"not a JSON object: {error}; e.g. {example}") from None
