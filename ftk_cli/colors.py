"""Answers in the colours of their probability, for a terminal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from ftk.errors import visible
from ftk.generation.token_text import token_texts

if TYPE_CHECKING:
    from ftk.generation.results import TextAnswer, TextPiece, TextResult
    from ftk.tokenizers import Tokenizer

COLORS = ((0.8, "32"), (0.5, "36"), (0.2, "33"), (0.0, "31"))
"""Colours of tokens: the first whose bound their probability reaches. Green, cyan, yellow, red."""


def use_color(choice: str, stream: TextIO | None) -> bool:
    """Whether to colour what is printed to `stream`.

    Args:
        choice: "always", "never", or "auto": on a terminal, unless the environment says NO_COLOR or TERM=dumb.
        stream: where it is printed; None: it is closed.
    """
    if choice != "auto":
        return choice == "always"
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream is not None and stream.isatty() and not is_plain


def colored_text(result: TextResult, tokenizer: Tokenizer, clean: Callable[[str], str]) -> str:
    """The text of a result, its answers underlined and each of their tokens in the colour of its probability.

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


def colored_piece(piece: TextPiece, answered: Mapping[int, TextAnswer], tokenizer: Tokenizer) -> str:
    """What a piece adds to the text, coloured as by `colored_text`, for a terminal.

    Args:
        piece: of an answer that is being written.
        answered: the answers that are complete, by their numbers; a piece may bring them to sight.
        tokenizer: as for `colored_text`.
    """
    text, at = "", 0
    for start, end, number in piece.filled_spans:
        answer = piece if number == piece.number else answered[number]
        text += visible(piece.filled[at:start]) + _colored(piece.filled[start:end], answer, tokenizer, visible)
        at = end
    return text + visible(piece.filled[at:])


def color_legend() -> str:
    """What the colours mean, each in its own."""
    bounds = [f"{bound:g} and more" for bound, _ in COLORS[:-1]] + ["less"]
    shown = ", ".join(f"\033[4;{code}m{words}\033[0m" for words, (_, code) in zip(bounds, COLORS, strict=True))
    return f"colours are the probabilities of tokens: {shown}"


def _colored(words: str, answer: TextAnswer | TextPiece, tokenizer: Tokenizer, clean: Callable[[str], str]) -> str:
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
