"""From a training sample back to a question: its context, and the reference answer of each blank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ftk.errors import UserError
from ftk.tasks.glm_blank.command_tokens import sentinels
from ftk.tasks.glm_blank.infill.blanks import find_blanks, mask_ids


class Question(NamedTuple):
    """A context with blanks, and what was there.

    Attributes:
        context: token ids.
        references: the ids of each blank, left to right, without end-of-piece tokens.
        ended: for each of them whether an end-of-piece token followed.
        order: the blanks' numbers in the order in which the sample answers them.
    """

    context: list[int]
    references: list[list[int]]
    ended: list[bool]
    order: list[int]

    def training_targets(self, eop: int) -> list[list[int]]:
        """The references as training predicts them: with an end-of-piece token where one followed."""
        return [[*ids, eop] if ended else ids for ids, ended in zip(self.references, self.ended, strict=True)]


def question_of(sample: Mapping[str, Any], special: Any) -> Question:
    """The context of a blank-infilling sample and its reference answers.

    Args:
        sample: `tokens`, `targets` [T], `position_ids` [2, T], `loss_mask` [T] bool, `context_length`; or `prompt`, and
            `answer` with the answers to its blanks from left to right, each with its end: the last ones may lack.
        special: the tokenizer's special tokens.

    Returns:
        answers sorted by their blanks, whatever order they were emitted in; without the end token.
    """
    if "prompt" in sample:
        context = [*sample["prompt"].context]
        given = split_answers(sample["answer"], special.eop)
        given += [[]] * (len(find_blanks(context, mask_ids(special))) - len(given))
        references = [_until_end(answer, special.eop) for answer in given]
        return Question(context, references, [special.eop in answer for answer in given], [*range(len(given))])
    length = int(sample["context_length"])
    if any(mask in sample["tokens"][:length] for mask, _ in sentinels(special)):
        raise UserError(
            "samples with numbered masks (`sentinel_tokens`) cannot be answered: generation fills blanks "
            "one after the other, each at its own place; train without `sentinel_tokens` for that"
        )
    context = np.asarray(sample["tokens"])[:length].tolist()
    text_positions = np.asarray(sample["position_ids"])[0]
    starts = np.flatnonzero(np.asarray(sample["tokens"])[length:] == special.sop) + length
    real_end = length + int(np.asarray(sample["loss_mask"])[length:].sum())  # padding has no loss
    ends = [*starts[1:], real_end]
    index_of = {int(position): index for index, position in enumerate(text_positions[:length])}
    blanks = find_blanks(context, mask_ids(special))
    answers = {  # with `gmask_runs_on` the one answer of a document has the place behind the context
        index_of.get(int(text_positions[start]), blanks[0]): np.asarray(sample["targets"][start:end]).tolist()
        for start, end in zip(starts, ends, strict=True)
    }
    return Question(
        context,
        [_until_end(answers[blank], special.eop) for blank in blanks],
        [special.eop in answers[blank] for blank in blanks],
        [blanks.index(blank) for blank in answers],
    )


def split_answers(ids: Sequence[int], eop: int) -> list[list[int]]:
    """Answers that follow each other: each to its end-of-piece token, which the last one may lack."""
    bounds = [0, *(place + 1 for place, token in enumerate(ids) if token == eop), len(ids)]
    return [[*ids[start:end]] for start, end in itertools.pairwise(bounds) if start < end]


def _until_end(ids: list[int], eop: int) -> list[int]:
    return ids[: ids.index(eop)] if eop in ids else ids
