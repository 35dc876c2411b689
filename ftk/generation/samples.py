"""From a training sample back to a question: its context, and the reference answer of each blank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ftk.errors import UserError
from ftk.generation.blanks import find_blanks, mask_ids


class Question(NamedTuple):
    """A context with blanks, and what was there: `references` has the ids of each blank, left to right."""

    context: list[int]
    references: list[list[int]]


def question_of(sample: Mapping[str, Any], special: Any) -> Question:
    """The context of a blank-infilling sample and its reference answers.

    Args:
        sample: `tokens`, `targets` [T], `position_ids` [2, T], `loss_mask` [T] bool, `context_length`.
        special: the tokenizer's special tokens.

    Returns:
        answers sorted by their blanks, whatever order they were emitted in; without the end token.
    """
    length = int(sample["context_length"])
    if any(mask in sample["tokens"][:length] for mask, _ in getattr(special, "sentinels", ())):
        raise UserError(
            "samples with numbered masks (--sentinel-tokens) cannot be answered: generation fills blanks "
            "one after the other, each at its own place; train without --sentinel-tokens for that"
        )
    context = np.asarray(sample["tokens"])[:length].tolist()
    text_positions = np.asarray(sample["position_ids"])[0]
    starts = np.flatnonzero(np.asarray(sample["tokens"])[length:] == special.sop) + length
    real_end = length + int(np.asarray(sample["loss_mask"])[length:].sum())  # padding has no loss
    ends = [*starts[1:], real_end]
    by_position = {
        int(text_positions[start]): _until_end(sample["targets"][start:end], special.eop)
        for start, end in zip(starts, ends, strict=True)
    }
    index_of = {int(position): index for index, position in enumerate(text_positions[:length])}
    answers = {index_of[position]: answer for position, answer in by_position.items()}
    return Question(context, [answers[blank] for blank in find_blanks(context, mask_ids(special))])


def _until_end(targets: Sequence[int], eop: int) -> list[int]:
    ids = np.asarray(targets).tolist()
    return ids[: ids.index(eop)] if eop in ids else ids
