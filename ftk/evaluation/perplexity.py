"""Perplexity of running text: windows that overlap, each token counted once, per token, word and byte."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ftk.config.options import option
from ftk.data.supervised.rows import rows_of
from ftk.data.text.paths import JSON_SUFFIXES
from ftk.errors import UserError
from ftk.evaluation.evaluation import Evaluation
from ftk.evaluation.likelihood import DEFAULT_WINDOW, Query, Reading, log_likelihoods
from ftk.evaluation.metrics import Group, Metric, Record
from ftk.files import as_user_error, read_bytes
from ftk.registry import register_evaluation

if TYPE_CHECKING:
    from ftk.generation.text import TextGenerator

MAX_BYTES = 1 << 30
"""Of a file of running text, which is encoded as a whole."""

LONGEST_WORD = 20
"""Mean characters per word above which a text has no words between spaces: Chinese, Japanese, Thai."""

_GREATEST_LOSS = 700.0  # nats, of which a float holds the exponential


@dataclass(kw_only=True)
class PerplexityConfig(Reading):
    window: int | None = option(
        None,
        "what the model reads at once; default: its positions less one, 1023 where it has no limit",
        min=2,
        unit="tokens",
    )
    stride: int | None = option(
        None,
        "from the start of a window to that of the next; of each but the first this many tokens count, the "
        "others are their context; default: a quarter of the window",
        min=1,
        unit="tokens",
    )
    detokenize: str = option(
        "none", "wikitext: undo the tokenization of WikiText before the text is encoded", choices=("none", "wikitext")
    )
    by_line: bool = option(False, "each line of a text file is a document of its own, not the whole file")

    def validate(self) -> Iterator[str]:
        if self.window is not None and self.stride is not None and self.stride >= self.window:
            yield f"stride is {self.stride}; it must be below window {self.window}, so that each token has a context"


class Window(NamedTuple):
    """A part of a document.

    Attributes:
        document, number: the numbers of the document, and of the window among all.
        place: of the document.
        start: place of the first token that counts, among the document's.
        context, scored: ids.
        share: of the document's tokens that count.
        units: what the document has of each unit of `count_units`.
    """

    document: int
    number: int
    place: str
    start: int
    context: Sequence[int]
    scored: Sequence[int]
    share: float
    units: Mapping[str, int]


@register_evaluation("perplexity", config=PerplexityConfig)
class Perplexity(Evaluation[Window]):
    """A document's first token is context and never counts."""

    config: PerplexityConfig
    unit = "window"

    def questions(self, path: str, generator: TextGenerator[Any], limit: int | None = None) -> list[Window]:
        window, stride = self.sizes(generator)
        found: list[Window] = []
        for number, (place, text) in enumerate(read_documents(path, self.config.by_line)):
            plain = detokenize_wikitext(text) if self.config.detokenize == "wikitext" else text
            ids, units = generator.tokenizer.encode(plain), count_units(text)
            for start, end in windows(len(ids), window, stride):
                first = start - (window - stride) if start > 1 else 0
                share = (end - start) / (len(ids) - 1)
                found.append(Window(number, len(found), place, start, ids[first:start], ids[start:end], share, units))
        if not found:
            raise UserError(f"{path} holds no text of two tokens or more")
        return found[:limit]

    def records(
        self,
        questions: Sequence[Window],
        generator: TextGenerator[Any],
        progress: Callable[[int], object] | None = None,
    ) -> list[Record]:
        asked = [Query(question.context, [question.scored]) for question in questions]
        found = log_likelihoods(generator, asked, self.config, progress=progress)
        return [
            {
                "idx": question.number,
                "place": question.place,
                "document": question.document,
                "start": question.start,
                "context": len(question.context),
                "tokens": len(question.scored),
                "logprob": math.fsum(scored.logprobs),
                **{unit: question.share * count for unit, count in question.units.items()},
            }
            for question, (scored,) in zip(questions, found, strict=True)
        ]

    def metrics(self) -> list[Metric]:
        return [
            _per("perplexity", "tokens"),
            _per("word_perplexity", "words", longest=LONGEST_WORD),
            _per("adjusted_perplexity", "spaced", less=1, longest=LONGEST_WORD),
            _per("bits_per_character", "characters", lambda nats: nats / math.log(2)),
            _per("bits_per_byte", "bytes", lambda nats: nats / math.log(2)),
        ]

    def group(self, record: Mapping[str, Any]) -> int:
        number: int = record["idx"]
        return number

    def settings(self, generator: TextGenerator[Any], questions: Sequence[Window] = ()) -> dict[str, Any]:
        window, stride = self.sizes(generator)
        return {**super().settings(generator), "window": window, "stride": stride}

    def sizes(self, generator: TextGenerator[Any]) -> tuple[int, int]:
        """The window and the stride for a model.

        Raises:
            UserError: the stride leaves no context.
        """
        limit: int | None = getattr(generator.framing, "max_positions", None)
        window = self.config.window or (DEFAULT_WINDOW if limit is None else limit - 1)
        stride = self.config.stride or -(-window // 4)
        if stride >= window:
            raise UserError(f"stride {stride} leaves no context in windows of {window} tokens; give a lower one")
        return window, stride


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """Which tokens count in each window: from, to; all but the first, each once.

    The first window counts all of its tokens but the first; each further one ends `stride` tokens behind the one before
    it, and counts these.

    Args:
        length: tokens of the document.
        window, stride: tokens.
    """
    if length < 2:
        return
    yield 1, min(window, length)
    for start in range(window, length, stride):
        yield start, min(start + stride, length)


def count_units(text: str) -> dict[str, int]:
    """What perplexities of a text are counted by, besides tokens.

    Returns:
        words: words and line ends, the usual count of WikiText; spaced: parts between single spaces, of which Du et al.
        (2022) count all but one; characters: of Unicode; bytes: in UTF-8.
    """
    return {
        "words": len(text.split()) + text.count("\n"),
        "spaced": len(text.strip().split(" ")),
        "characters": len(text),
        "bytes": len(text.encode("utf-8", "surrogatepass")),
    }


def read_documents(path: str, by_line: bool) -> list[tuple[str, str]]:
    """The texts of a file, each behind its place (file, or file:line): of JSON lines their field `text`; else the whole
    file, or its lines that hold any.

    Args:
        by_line: whether each line of a text file is a document.

    Raises:
        UserError: it cannot be read; names the line.
    """
    if Path(path).name.removesuffix(".gz").endswith(JSON_SUFFIXES):
        return [(row.place, row.text("text")) for row in rows_of(path)]
    with as_user_error(path):
        content = read_bytes(path, MAX_BYTES)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8; convert the file") from None
    if not by_line:
        return [(path, text)]
    lines = enumerate(text.split("\n"), start=1)
    return [(f"{path}:{number}", line.strip()) for number, line in lines if line and not line.isspace()]


_WIKITEXT: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    (r"/' [0-9]/", "/'[0-9]/"),
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    (r" : ", ": "),
    (r" ; ", "; "),
    (r" \. ", ". "),
    (r" ! ", "! "),
    (r" \? ", "? "),
    (r" , ", ", "),
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (r" ° ", "°"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)


def detokenize_wikitext(text: str) -> str:
    """WikiText as it was written: the rules of Megatron-LM's `wikitext_detokenizer`, in their order."""
    for pattern, replacement in _WIKITEXT:
        text = re.sub(pattern, replacement, text)
    return text


def _per(
    name: str, unit: str, of: Callable[[float], float] | None = None, less: int = 0, longest: float = math.inf
) -> Metric:
    """A function of the nats for each of a unit, of which `less` do not count; exp, if none is given.

    Not defined where the mean of the unit has more than `longest` characters.
    """

    def add(group: Group) -> list[float]:
        return [sum(record[key] for record in group) for key in ("logprob", unit, "characters")]

    def value(sums: np.ndarray) -> float:
        if sums[1] and sums[2] > longest * sums[1]:
            return math.nan
        nats = -sums[0] / (sums[1] - less) if sums[1] > less else math.nan
        return of(nats) if of is not None else math.exp(min(nats, _GREATEST_LOSS))

    return Metric(name, add, value, percent=False)
