"""How generated answers are printed: fairseq's S-, T-, H-, D- and P- lines, one JSON object a line, or in colours."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from ftk.errors import visible
from ftk.generation.token_text import token_texts

if TYPE_CHECKING:
    from ftk.tasks.glm_blank.infill.config import FillConfig
    from ftk.tasks.glm_blank.infill.results import FilledBlank, FillResult
    from ftk.tasks.glm_blank.infill.streaming import Piece
    from ftk.tokenizers import Tokenizer

NOTE = (
    "NOTE: scores are natural logarithms; H and D carry the sum of an answer's log-probabilities divided by "
    "length ** {length_penalty:g}, P one log-probability per token, the end token's included"
)

COLORS = ((0.8, "32"), (0.5, "36"), (0.2, "33"), (0.0, "31"))
"""Colours of tokens: the first whose bound their probability reaches. Green, cyan, yellow, red."""

_ESCAPES = {ord(one): repr(one)[1:-1] for one in "\\\n\r\t\v\f\x1c\x1d\x1e\x85\u2028\u2029"}
_JSON_ESCAPES = {ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}  # those that JSON itself leaves


def note(config: FillConfig) -> str:
    """What the numbers in text lines mean."""
    fused = f"; in H and D those of the language model are added {config.lm_weight:g} times"
    over_text = "; N the same for all answers to a text together"
    return (
        NOTE.format(length_penalty=config.length_penalty)
        + fused * (config.lm_path is not None)
        + over_text * (config.nbest_over == "text")
    )


class Candidate(NamedTuple):
    """One of the n best answers to all blanks of a text together.

    Attributes:
        score: of all its answers together.
        answers: one per blank.
        text: the filled text, where it is known.
    """

    score: float
    answers: Sequence[FilledBlank]
    text: str | None = None


def text_lines(
    index: int,
    source: str,
    answers: Sequence[FilledBlank],
    tokenizer: Tokenizer,
    references: Sequence[str] | None = None,
    filled: str | None = None,
    print_step: bool = False,
    candidates: Sequence[Candidate] = (),
    terminal: bool = False,
) -> Iterator[str]:
    """One sample as tab-separated lines.

    `S-` source with its blanks; then for each blank, from left to right, `T-` reference, `H-` score and
    tokens, `D-` score and text, `P-` log-probabilities, `A-` the likeliest tokens at one place (if asked for),
    these for each of the n best answers, best first; with `print_step` `I-` steps of the best answers; at last
    `F-` filled text. `T-`, `F-` only if given. With `candidates` the lines of the answers come for each, in front of
    them `N-`, its score and its text.

    Args:
        index: number of the sample.
        source: text with blanks.
        answers: one per blank.
        tokenizer: names the tokens.
        references: one per blank, if known.
        filled: the text with its blanks filled, on one line (`one_line` or `colored_text` makes it so).
        print_step: whether to say how many steps were taken.
        candidates: the n best fillings of the text as a whole, if requested; `answers` are those of the first.
        terminal: whether the lines are for a terminal, which must not be steered by what is in them.
    """
    clean = terminal_line if terminal else one_line
    yield f"S-{index}\t{clean(source)}"
    if not candidates:
        yield from _answer_lines(index, answers, tokenizer, references, clean)
    for candidate in candidates:
        yield f"N-{index}\t{candidate.score:.4f}" + ("" if candidate.text is None else f"\t{clean(candidate.text)}")
        yield from _answer_lines(
            index, candidate.answers, tokenizer, references if candidate is candidates[0] else None, clean
        )
    if print_step:
        yield f"I-{index}\t{num_steps(answers)}"
    if filled is not None:
        yield f"F-{index}\t{filled}"


def _answer_lines(
    index: int,
    answers: Sequence[FilledBlank],
    tokenizer: Tokenizer,
    references: Sequence[str] | None,
    clean: Callable[[str], str],
) -> Iterator[str]:
    """The lines about each blank."""
    for number, answer in enumerate(answers):
        if references is not None:
            yield f"T-{index}\t{clean(references[number])}"
        for one in (answer, *answer.others):
            tokens = " ".join(_name(tokenizer, token, clean) for token in one.tokens)
            yield f"H-{index}\t{one.score:.4f}\t{tokens}"
            yield f"D-{index}\t{one.score:.4f}\t{clean(one.text)}"
            yield f"P-{index}\t{' '.join(f'{value:.4f}' for value in one.token_logprobs)}"
            for place in one.alternatives:
                named = (f"{_name(tokenizer, token, clean)} {value:.4f}" for token, value in place)
                yield f"A-{index}\t" + "\t".join(named)


def json_line(
    index: int,
    source: str,
    answers: Sequence[FilledBlank],
    tokenizer: Tokenizer,
    references: Sequence[str] | None = None,
    filled: str | None = None,
    print_step: bool = False,
    candidates: Sequence[Candidate] = (),
    terminal: bool = False,
) -> str:
    """One sample as a JSON object; arguments as in `text_lines`, `filled` as it is."""
    record: dict[str, Any] = {"id": index, "source": source}
    if filled is not None:
        record["text"] = filled
    if candidates:
        record["score"] = candidates[0].score
    record["answers"] = _described(answers, tokenizer)
    if references is not None:
        for answer, reference in zip(record["answers"], references, strict=True):
            answer["reference"] = reference
    if print_step:
        record["steps"] = num_steps(answers)
    if candidates:
        record["others"] = [
            {
                **({} if candidate.text is None else {"text": candidate.text}),
                "score": candidate.score,
                "answers": _described(candidate.answers, tokenizer),
            }
            for candidate in candidates[1:]
        ]
    return json_record(record, terminal)


def json_record(record: dict[str, Any], terminal: bool = False) -> str:
    """A record as JSON on one line, whichever characters its reader takes for the end of one.

    Args:
        record: what the line holds.
        terminal: whether what could steer a terminal is escaped, too; the line means the same.
    """
    line = json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_JSON_ESCAPES)
    if terminal and visible(line, keep="") != line:
        line = "".join(one if visible(one, keep="") == one else json.dumps(one)[1:-1] for one in line)
    return line


def error_line(index: int, message: str, as_json: bool, terminal: bool = False) -> str:
    """A sample that could not be answered: `E-` with the number of its line, counted from 1, or a JSON object."""
    if as_json:
        return json_record({"id": index, "line": index + 1, "error": message}, terminal)
    return f"E-{index}\tline {index + 1}: {(terminal_line if terminal else one_line)(message)}"


def num_steps(answers: Sequence[FilledBlank]) -> int:
    """Steps in which the best answers were written: one for each of their tokens, the end tokens counted."""
    return sum(len(answer.token_logprobs) for answer in answers)


def use_color(choice: str, stream: TextIO | None) -> bool:
    """Whether to colour what is printed to `stream`.

    Args:
        choice: "always", "never", or "auto": on a terminal, unless the environment has NO_COLOR or TERM=dumb.
        stream: where it is printed; None: it is closed.
    """
    if choice != "auto":
        return choice == "always"
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream is not None and stream.isatty() and not is_plain


def colored_text(result: FillResult, tokenizer: Tokenizer, clean: Callable[[str], str]) -> str:
    """The filled text, its answers underlined and each of their tokens in the colour of its probability (`COLORS`).

    Args:
        result: text with the places of its answers.
        tokenizer: knows which characters a token has written.
        clean: what is done to each part of the text: `one_line`, `terminal_line`.
    """
    text, at = "", 0
    for (start, end), answer in zip(result.spans, result.answers, strict=True):
        text += clean(result.text[at:start]) + _colored(result.text[start:end], answer, tokenizer, clean)
        at = end
    return text + clean(result.text[at:])


def colored_piece(piece: Piece, answered: Mapping[int, FilledBlank], tokenizer: Tokenizer) -> str:
    """What a piece adds to the filled text, coloured as by `colored_text`, for a terminal.

    Args:
        piece: of an answer that is being written.
        answered: the answers that are complete, by the numbers of their blanks; a piece may bring them to sight.
        tokenizer: as for `colored_text`.
    """
    text, at = "", 0
    for start, end, blank in piece.filled_spans:
        of_blank = piece if blank == piece.blank else answered[blank]
        text += visible(piece.filled[at:start]) + _colored(piece.filled[start:end], of_blank, tokenizer, visible)
        at = end
    return text + visible(piece.filled[at:])


def color_legend() -> str:
    """What the colours mean, each in its own."""
    bounds = [f"{bound:g} and more" for bound, _ in COLORS[:-1]] + ["less"]
    shown = ", ".join(f"\033[4;{code}m{words}\033[0m" for words, (_, code) in zip(bounds, COLORS, strict=True))
    return f"colours are the probabilities of tokens: {shown}"


def _colored(words: str, answer: FilledBlank | Piece, tokenizer: Tokenizer, clean: Callable[[str], str]) -> str:
    """Words underlined, those of each token in the colour of its probability (of several: their geometric mean)."""
    space = words[: len(words) - len(words.lstrip())]
    text, last = "", ""
    for part in token_texts(words[len(space) :], answer.tokens, answer.token_logprobs, tokenizer.decode):
        probability = math.exp(sum(part.logprobs) / max(1, len(part.logprobs)))
        code = next(code for bound, code in COLORS if probability >= bound)
        if code != last:
            text += ("\033[0m" if last else "") + f"\033[4;{code}m"
        text += clean(space + part.text)
        space, last = "", code
    return text + ("\033[0m" if last else clean(space))


def _name(tokenizer: Tokenizer, token: int, clean: Callable[[str], str]) -> str:
    """A token on one line and without spaces."""
    return clean(tokenizer.token_text(token)).replace(" ", "▁")


def _described(answers: Sequence[FilledBlank], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Answers with their blanks."""
    return [{"blank": answer.blank, **_numbers(answer, tokenizer)} for answer in answers]


def _numbers(answer: FilledBlank, tokenizer: Tokenizer) -> dict[str, Any]:
    """An answer without its blank; with the others of the n best, where there are any."""
    record: dict[str, Any] = {
        "text": answer.text,
        "tokens": answer.tokens,
        "score": answer.score,
        "token_logprobs": answer.token_logprobs,
    }
    if answer.lm_logprobs:
        record["lm_logprobs"] = list(answer.lm_logprobs)
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


def terminal_line(text: str) -> str:
    """As `one_line`, and nothing in it steers a terminal: control and format characters are shown as `\\xNN`."""
    return visible(one_line(text), keep="")


def is_terminal(results: object | None) -> bool:
    """Whether records go to a terminal: there is no file of results, and stdout is one."""
    return results is None and sys.stdout is not None and sys.stdout.isatty()
