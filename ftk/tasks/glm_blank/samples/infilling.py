"""One GLM training sample of a document and given spans; training makes batches by the same kernel, see `dataset`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ftk.tasks.glm_blank.samples._infilling import build_arrays

if TYPE_CHECKING:
    from ftk.tokenizers import SpecialTokens

OBJECTIVES = ("token", "sentence", "document")  # a sample's objective number is its place here


@dataclass(frozen=True)
class Sample:
    """One sample: the context with its blanks, then the answers (Du et al. 2022, figure 2).

    Args:
        tokens: int64 [T], inputs: context, then per answer the start token and the answer.
        targets: int64 [T]: the context again, then per answer the answer and the end token.
        loss_mask: bool [T], true on every answer's targets.
        position_ids: int64 [2, T]. Row 0: place in the context; an answer has the place of its blank. Row 1: 0 in
            the context, 1, 2, ... in an answer (start token included).
        context_length: number of context tokens, blanks included; they see each other, answers see what precedes.
        objective: 0 token, 1 sentence, 2 document.
        document_ids: int64 [T] where packed documents do not see each other, else None: the number of each
            token's document in the text; an answer has its blank's.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    position_ids: NDArray[np.int64]
    context_length: int
    objective: int
    document_ids: NDArray[np.int64] | None = None


def build_sample(
    document: ArrayLike,
    spans: ArrayLike,
    answer_order: ArrayLike,
    objective: str = "token",
    *,
    special: SpecialTokens,
    block_positions: bool = True,
    append_end: bool = True,
    position_offset: int = 0,
    answer_position: int | None = None,
    sentinels: Sequence[tuple[int, int]] = (),
) -> Sample:
    """Makes the sample of a document whose spans are blanked out.

    Args:
        document: token ids [N].
        spans: half-open [start, end) places in the document, [K, 2], in any order; they may touch, not overlap.
        answer_order: the same spans, in the order in which their answers are emitted.
        objective: "token", "sentence" or "document". It decides the mask token: mask, smask or gmask; without task
            masks always mask.
        block_positions: whether row 1 of the positions counts inside an answer; otherwise it is 1 there.
        append_end: whether an end token follows each answer in the targets. Without it an answer's own last
            token is its end: so a generated document ends in eos, and one that was cut ends in nothing.
        position_offset: place of the first token.
        answer_position: place of all answers in row 0, instead of the places of their blanks.
        sentinels: (mask, start) ids of the second, third, ... answer; the first has the plain ones. The numbered
            masks are used by the token objective only.

    Returns:
        The sample. T = N + 2K, or N + K without append_end.

    Raises:
        ValueError: an empty, overlapping or outside span, an answer order that is not an order of the spans, an
            unknown objective, an end of document inside an answer, missing command tokens or sentinels.

    Source: THUDM/GLM blocklm_utils.py, make_block_data.
    """
    ids = np.ascontiguousarray(document, dtype=np.int64)
    if ids.ndim != 1:
        raise ValueError(f"the document has shape {ids.shape}; it must be one row of token ids")
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; it must be one of {', '.join(OBJECTIVES)}")
    number = OBJECTIVES.index(objective)
    places, order = _checked_spans(spans, answer_order, len(ids))
    for start, end in places:
        inside = ids[start:end] if append_end else ids[start : end - 1]
        if (inside == special.eos).any():
            raise ValueError(f"the span [{start}, {end}) reaches over an end of document (token {special.eos})")
    masks, starts = command_ids(len(places), number, special, sentinels)
    if special.eop is None:
        raise ValueError("the tokenizer has no end token (eop)")
    tokens, targets, loss_mask, position_ids, context_length = build_arrays(
        ids,
        places,
        order,
        masks,
        starts,
        special.eop,
        block_positions,
        append_end,
        position_offset,
        -1 if answer_position is None else answer_position,
    )
    return Sample(tokens, targets, loss_mask, position_ids, context_length, number)


def mask_token(special: SpecialTokens, objective: int) -> int:
    """The id that stands for a blank of the objective; plain mask where the tokenizer has no task masks."""
    task_mask = (None, special.smask, special.gmask)[objective]
    mask = special.mask if task_mask is None else task_mask
    if mask is None:
        raise ValueError("the tokenizer has no mask token")
    return mask


def command_ids(
    count: int, objective: int, special: SpecialTokens, sentinels: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Mask and start ids of the first, second, ... answer: each int64 [K]."""
    if special.sop is None:
        raise ValueError("the tokenizer has no start token (sop)")
    masks = np.full(count, mask_token(special, objective), dtype=np.int64)
    starts = np.full(count, special.sop, dtype=np.int64)
    if len(sentinels) and count > 1:
        if len(sentinels) < count - 1:
            raise ValueError(f"{count} spans need {count - 1} sentinels; there are {len(sentinels)}")
        numbered = np.asarray(sentinels[: count - 1], dtype=np.int64)  # [K-1, 2]
        starts[1:] = numbered[:, 1]
        if objective == 0:
            masks[1:] = numbered[:, 0]
    return masks, starts


def _checked_spans(spans: Any, answer_order: Any, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The spans sorted by their start, int64 [K, 2], and per answer the number of its span, int64 [K]."""
    places = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    answers = np.asarray(answer_order, dtype=np.int64).reshape(-1, 2)
    places = np.ascontiguousarray(places[np.argsort(places[:, 0], kind="stable")])
    order = np.argsort(answers[:, 0], kind="stable")
    if not np.array_equal(answers[order], places):
        raise ValueError(f"answer_order {answers.tolist()} is not an order of the spans {places.tolist()}")
    previous_end = 0
    for start, end in places.tolist():
        if not 0 <= start < end <= length:
            raise ValueError(f"the span [{start}, {end}) is empty or outside the document of {length} tokens")
        if start < previous_end:
            raise ValueError(f"the span [{start}, {end}) overlaps the one before it, which ends at {previous_end}")
        previous_end = end
    span_of_answer = np.empty(len(order), dtype=np.int64)
    span_of_answer[order] = np.arange(len(order))
    return places, span_of_answer
