"""Where the blanks of a context are, and which tokens at which positions follow it when they are filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ftk.errors import UserError


class Chunk(NamedTuple):
    """Tokens to be read by the model, with their 2-D positions: three lists of one length."""

    tokens: list[int]
    text_positions: list[int]
    block_positions: list[int]


def mask_ids(special: Any) -> tuple[int, ...]:
    """The ids that stand for a blank: [MASK], [sMASK] and [gMASK] as far as they exist.

    Args:
        special: `SpecialTokens`, or any object with those of its attributes that are there.
    """
    ids = (getattr(special, name, None) for name in ("mask", "smask", "gmask"))
    return tuple(one for one in ids if one is not None)


def end_ids(special: Any) -> tuple[int, ...]:
    """The ids that end an answer, as in the original: end of piece, and end of text where there is one."""
    eop, eos = special.eop, getattr(special, "eos", None)
    return (eop,) if eos is None or eos == eop else (eop, eos)


def find_blanks(context: Sequence[int], masks: Sequence[int]) -> list[int]:
    """Indices of the blanks in a context, from left to right."""
    return [index for index, token in enumerate(context) if token in masks]


def context_chunk(
    context: Sequence[int],
    sop: int,
    blank: int,
    filled: Sequence[tuple[int, Sequence[int]]] = (),
    in_blocks: bool = True,
) -> Chunk:
    """The context, the answers that are there already, and the start of the next blank's answer.

    Args:
        context: token ids.
        sop: id of the start token.
        blank: index of the next blank in the context.
        filled: index of a blank and its answer, as they are read.
        in_blocks: as for `next_chunk`.
    """
    chunk = Chunk(list(context), [*range(len(context))], [0] * len(context))
    for place, answer in [*filled, (blank, ())]:
        chunk.tokens.extend([sop, *answer])
        chunk.text_positions.extend([place] * (len(answer) + 1))
        chunk.block_positions.extend(step + 1 if in_blocks else 1 for step in range(len(answer) + 1))
    return chunk


def next_chunk(answer: Sequence[int], previous: int, sop: int, blank: int, in_blocks: bool) -> Chunk:
    """The answer that was found for one blank and the start of the next one's.

    Args:
        answer: tokens without the end token; their start token was read before.
        previous: index of the blank they fill.
        sop: id of the start token.
        blank: index of the next blank.
        in_blocks: whether places within a blank are counted (2-D positions) or always 1.
    """
    blocks = [step + 2 if in_blocks else 1 for step in range(len(answer))]
    return Chunk([*answer, sop], [previous] * len(answer) + [blank], [*blocks, 1])


def check_positions(context_length: int, num_blanks: int, max_len: int, max_positions: int, in_blocks: bool) -> None:
    """Refuses a context, or a length of answers, that the position tables do not reach.

    Args:
        context_length: tokens of the context.
        num_blanks: its blanks.
        max_len: longest answer.
        max_positions: as in the model's config; with 2-D positions the tables have one row more.
        in_blocks: whether the model has 2-D positions.

    Raises:
        UserError: with the numbers.
    """
    num_rows = max_positions + 1 if in_blocks else max_positions
    if context_length > num_rows:
        raise UserError(
            f"the prompt is {context_length} tokens long, but the model has {num_rows} positions; "
            "shorten the prompt, or cut it with truncate (--truncate)"
        )
    last = max_len + (1 if num_blanks > 1 else 0)  # a full answer is read whole only if another blank follows
    if in_blocks and last >= num_rows:
        raise UserError(
            f"answers of {max_len} tokens need {last + 1} positions within a blank, but the model has "
            f"{num_rows}; max_len (--max-len) can be at most {max_len - (last + 1 - num_rows)}"
        )
    if max_len > num_rows:  # no table ends there, but memory would
        raise UserError(
            f"answers of {max_len} tokens are longer than all {num_rows} positions of the model; "
            f"max_len (--max-len) can be at most {num_rows}"
        )
