"""How generated answers are printed: fairseq's S-, T-, H-, D- and P- lines, one JSON object a line, or in colours."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from ftk.generation.fill import FilledBlank, FillResult
    from ftk.tokenizers import Tokenizer

NOTE = (
    "NOTE: scores are natural logarithms; H and D carry the sum of an answer's log-probabilities divided by "
    "length ** {length_penalty:g}, P one log-probability per token, the end token's included"
)

COLORS = ((0.8, "32"), (0.5, "36"), (0.2, "33"), (0.0, "31"))
"""Colours of answers: the first whose bound their probability a token reaches. Green, cyan, yellow, red."""

_ESCAPES = {ord(one): repr(one)[1:-1] for one in "\\\n\r\t\v\f\x1c\x1d\x1e\x85\u2028\u2029"}


def text_lines(
    index: int,
    source: str,
    answers: Sequence[FilledBlank],
    tokenizer: Tokenizer,
    references: Sequence[str] | None = None,
    filled: str | None = None,
    print_step: bool = False,
) -> Iterator[str]:
    """One sample as tab-separated lines.

    `S-` source with its blanks; then for each blank, from left to right, `T-` reference, `H-` score and
    tokens, `D-` score and text, `P-` log-probabilities, `A-` the likeliest tokens at one place (if asked for),
    these for each of the n best answers, best first; with `print_step` `I-` steps of the best answers; at last
    `F-` filled text. `T-`, `F-` only if given.

    Args:
        index: number of the sample.
        source: text with blanks.
        answers: one per blank.
        tokenizer: names the tokens.
        references: one per blank, if known.
        filled: the text with its blanks filled, on one line (`one_line` or `colored_text` makes it so).
        print_step: whether to say how many steps were taken.
    """
    yield f"S-{index}\t{one_line(source)}"
    for number, answer in enumerate(answers):
        if references is not None:
            yield f"T-{index}\t{one_line(references[number])}"
        for one in (answer, *answer.others):
            tokens = " ".join(_name(tokenizer, token) for token in one.tokens)
            yield f"H-{index}\t{one.score:.4f}\t{tokens}"
            yield f"D-{index}\t{one.score:.4f}\t{one_line(one.text)}"
            yield f"P-{index}\t{' '.join(f'{value:.4f}' for value in one.token_logprobs)}"
            for place in one.alternatives:
                yield f"A-{index}\t" + "\t".join(f"{_name(tokenizer, token)} {value:.4f}" for token, value in place)
    if print_step:
        yield f"I-{index}\t{num_steps(answers)}"
    if filled is not None:
        yield f"F-{index}\t{filled}"


def json_line(
    index: int,
    source: str,
    answers: Sequence[FilledBlank],
    tokenizer: Tokenizer,
    references: Sequence[str] | None = None,
    filled: str | None = None,
    print_step: bool = False,
) -> str:
    """One sample as a JSON object; arguments as in `text_lines`, `filled` as it is."""
    record: dict[str, Any] = {"id": index, "source": source}
    if filled is not None:
        record["text"] = filled
    record["answers"] = [{"blank": answer.blank, **_numbers(answer, tokenizer)} for answer in answers]
    if references is not None:
        for answer, reference in zip(record["answers"], references, strict=True):
            answer["reference"] = reference
    if print_step:
        record["steps"] = num_steps(answers)
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def error_line(index: int, message: str, as_json: bool) -> str:
    """A sample that could not be answered: `E-` with the number of its line, counted from 1, or a JSON object."""
    if as_json:
        return json.dumps({"id": index, "line": index + 1, "error": message}, ensure_ascii=False)
    return f"E-{index}\tline {index + 1}: {one_line(message)}"


def num_steps(answers: Sequence[FilledBlank]) -> int:
    """Steps in which the best answers were written: one for each of their tokens, the end tokens counted."""
    return sum(len(answer.token_logprobs) for answer in answers)


def use_color(choice: str, stream: TextIO) -> bool:
    """Whether to colour what is printed to `stream`.

    Args:
        choice: "always", "never", or "auto": on a terminal, unless the environment says NO_COLOR or TERM=dumb.
        stream: where it is printed.
    """
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colored_text(result: FillResult, escape: bool = True) -> str:
    """The filled text, each answer in the colour of its probability a token (`COLORS`) and underlined.

    Args:
        result: text with the places of its answers.
        escape: whether to keep it on one line, as `one_line`.
    """
    clean = one_line if escape else str
    text, at = "", 0
    for (start, end), answer in zip(result.spans, result.answers, strict=True):
        words = clean(result.text[start:end])
        text += clean(result.text[at:start]) + (f"\033[4;{_color(answer)}m{words}\033[0m" if words else "")
        at = end
    return text + clean(result.text[at:])


def _color(answer: FilledBlank) -> str:
    """The code of a colour for the mean (geometric) probability of an answer's tokens."""
    probability = math.exp(sum(answer.token_logprobs) / max(1, len(answer.token_logprobs)))
    return next(code for bound, code in COLORS if probability >= bound)


def _name(tokenizer: Tokenizer, token: int) -> str:
    """A token on one line and without spaces."""
    return one_line(tokenizer.token_text(token)).replace(" ", "▁")


def _numbers(answer: FilledBlank, tokenizer: Tokenizer) -> dict[str, Any]:
    """An answer without its blank; with the others of the n best, where there are any."""
    record: dict[str, Any] = {
        "text": answer.text,
        "tokens": answer.tokens,
        "score": answer.score,
        "token_logprobs": answer.token_logprobs,
    }
    if answer.alternatives:
        record["alternatives"] = [
            [
                {"token": token, "text": tokenizer.token_text(token), "logprob": value}
                for token, value in place
                if math.isfinite(value)
            ]
            for place in answer.alternatives
        ]
    if answer.others:
        record["others"] = [_numbers(other, tokenizer) for other in answer.others]
    return record


def one_line(text: str) -> str:
    """Text that keeps to its line and column: breaks and tabs are written as in a string literal."""
    return text.translate(_ESCAPES)
