"""Where the blanks of a context are, in which order they are filled, and which tokens stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftk.errors import UserError


def mask_ids(special: Any) -> tuple[int, ...]:
    """The ids that stand for a blank: [MASK], [sMASK] and [gMASK] as far as they exist.

    Args:
        special: `SpecialTokens`, or any object with those of its attributes that are there.
    """
    ids = (getattr(special, name, None) for name in ("mask", "smask", "gmask"))
    return tuple(mask for mask in ids if mask is not None)


def end_ids(special: Any) -> tuple[int, ...]:
    """The ids that end an answer, as in the original: end of piece, and end of text where there is one."""
    eop, eos = special.eop, getattr(special, "eos", None)
    return (eop,) if eos is None or eos == eop else (eop, eos)


def find_blanks(context: Sequence[int], masks: Sequence[int]) -> list[int]:
    """Indices of the blanks in a context, from left to right."""
    return [index for index, token in enumerate(context) if token in masks]


def blank_numbers(order: str, count: int) -> list[int]:
    """The blanks' numbers, from 0 on, in the order in which they are filled.

    Args:
        order: "left", or numbers from 1 on with commas between: these first, as far as they are there, then the
            others from left to right.
        count: blanks there are.
    """
    named = [] if order == "left" else [int(number) - 1 for number in order.split(",")]
    first = dict.fromkeys(number for number in named if number < count)
    return [*first, *(number for number in range(count) if number not in first)]


def check_length(context_length: int, num_rows: int) -> None:
    """Raises UserError if a context has more tokens than the table of positions has rows."""
    if context_length > num_rows:
        raise UserError(
            f"the prompt is {context_length} tokens long, but the model has positions for {num_rows}; "
            "shorten the prompt, or cut it with `truncate` left"
        )


def check_positions(context_length: int, num_blanks: int, max_len: int, max_positions: int, in_blocks: bool) -> None:
    """Refuses a context, or a length of answers, that the position tables do not reach.

    Args:
        context_length: tokens of the context.
        max_len: longest answer.
        max_positions: as in the model's config; with 2-D positions the tables have one row more.
        in_blocks: whether the model has 2-D positions.

    Raises:
        UserError: with the numbers.
    """
    num_rows = max_positions + 1 if in_blocks else max_positions
    check_length(context_length, num_rows)
    last = max_len + (1 if num_blanks > 1 else 0)  # a full answer is read whole only if another blank follows
    if in_blocks and last >= num_rows:
        raise UserError(
            f"answers of {max_len} tokens need {last + 1} positions within a blank, but the model has "
            f"{num_rows}; `max_len` can be at most {max_len - (last + 1 - num_rows)}"
        )
    if max_len > num_rows:  # no table ends there, but memory would
        raise UserError(
            f"answers of {max_len} tokens are longer than all {num_rows} positions of the model; "
            f"`max_len` can be at most {num_rows}"
        )
