"""Scores answers that are given instead of found: the log-probability of each of their tokens, in one forward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.generation.blanks import find_blanks
from ftk.generation.search import Answer, not_finite
from ftk.modules.attention import MaskedAttention
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.modules.masks import Visibility

if TYPE_CHECKING:
    from ftk.tasks.glm_blank.infill.generator import BlankGenerator

MAX_TOKENS = 8192
"""Tokens, padding counted, that go through the model at once; a longer row goes alone."""

MAX_PAIRS = 2**25
"""Pairs of tokens in the masks of a batch: what bounds a batch of long rows."""

LIKELIEST = -2
"""Stands for the likeliest token among targets."""

LOGITS_AT_ONCE = 512
"""Rows of the output layer at a time, so that memory does not grow with the vocabulary times the answers."""


@torch.inference_mode()
def score_ids(
    generator: BlankGenerator,
    contexts: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[Sequence[int]]]],
    orders: Sequence[Sequence[int]] | None = None,
    end: bool = True,
    progress: Callable[[int], object] | None = None,
) -> list[list[list[Answer]]]:
    """Log-probabilities of given answers, as `BlankGenerator` would have found them on the way to these answers.

    An answer is read behind those of the blanks that come before it, each as it is given. The candidates of one
    context stand side by side behind one copy of it, seeing it and themselves, as long as they have no more tokens
    than the context: beyond that the pairs of tokens that do not see each other would cost more than they save.

    Args:
        generator: whose model, special tokens and length_penalty are used; its processors are not.
        contexts: N contexts, token ids with mask tokens as blanks.
        candidates: for each context any number of candidates, each with one list of ids for every blank, from left to
            right. Ids that finish with an end token are scored with it.
        orders: for each context the order in which its blanks are filled, numbers from 0; left to right if None.
        end: whether the end-of-piece token is scored behind answers that have no end token.
        progress: called with the number of contexts that have been scored since the last call.

    Returns:
        per context and candidate one answer a blank, from left to right; its tokens are without the end token,
        `score` is the sum of its log-probabilities / their number ** length_penalty.

    Raises:
        UserError: numbers of contexts, candidates, blanks that do not fit; what the positions do not reach; a
            log-probability is NaN or infinite.
    """
    if len(candidates) != len(contexts):
        raise UserError(f"answers for {len(candidates)} contexts, but there are {len(contexts)}; give some for each")
    rows: list[_Row] = []
    for number, (context, own) in enumerate(zip(contexts, candidates, strict=True)):
        blanks = find_blanks(context, generator.masks)
        order = list(range(len(blanks))) if orders is None else list(orders[number])
        if sorted(order) != list(range(len(blanks))):
            raise UserError(
                f"order {order} is not one of all {len(blanks)} blanks; name each of 0 to {len(blanks) - 1}"
            )
        branches = [_branch(generator, blanks, order, answers, end) for answers in own]
        if generator.max_positions is not None:
            _check(len(context), branches, generator.max_positions + generator.in_blocks)
        rows += _rows(number, list(context), branches)
    scored: list[list[list[Answer]]] = [[[] for _ in own] for own in candidates]
    progress = progress or (lambda count: None)
    waiting = Counter(row.context_number for row in rows)
    progress(len(contexts) - len(waiting))  # those without a candidate
    with evaluation_mode(generator.model):
        for batch in _batches(rows):
            logprobs = iter(_target_logprobs(generator, batch))
            for row in batch:
                for number, branch in zip(row.numbers, row.branches, strict=True):
                    values = [next(logprobs) for _ in range(sum(branch.scored))]
                    scored[row.context_number][number] = _answers(generator, branch, values)
                waiting[row.context_number] -= 1
            progress(sum(waiting[number] == 0 for number in {row.context_number for row in batch}))
    return scored


@torch.inference_mode()
def first_token_logprobs(
    generator: BlankGenerator,
    contexts: Sequence[list[int]],
    filled: Sequence[Sequence[tuple[int, list[int]]]],
    blanks: Sequence[Sequence[int]],
) -> list[list[float]]:
    """How surely the answer of each blank would begin if it were filled next; one reading for all of a context's.

    Args:
        generator: whose model is asked.
        contexts: N contexts.
        filled: for each the places and answers of blanks that were filled before.
        blanks: for each the places of the blanks in question.

    Returns:
        per context and blank the log-probability of the likeliest first token.
    """
    rows = []
    for number, (context, before, places) in enumerate(zip(contexts, filled, blanks, strict=True)):
        trunk = _Branch([], [], [], [], [], [], [])
        for place, answer in before:
            length = len(answer) + 1
            trunk.tokens.extend([generator.sop, *answer])
            trunk.text_positions.extend([place] * length)
            trunk.block_positions.extend(range(1, length + 1) if generator.in_blocks else [1] * length)
            trunk.targets.extend([0] * length)
            trunk.scored.extend([False] * length)
        starts = [_Branch([generator.sop], [place], [1], [LIKELIEST], [True], [], []) for place in places]
        rows.append(_Row(number, context, [], [trunk, *starts], first_owner=0))
    found: list[list[float]] = [[] for _ in contexts]
    with evaluation_mode(generator.model):
        for batch in _batches(rows):
            values = iter(_target_logprobs(generator, batch))
            for row in batch:
                found[row.context_number] = [next(values) for _ in row.branches[1:]]
    return found


def check_answers(
    generator: BlankGenerator,
    context: Sequence[int],
    candidates: Sequence[Sequence[Sequence[int]]],
    end: bool = True,
) -> None:
    """Raises the UserError that `score_ids` would raise for this context with these candidates."""
    blanks = find_blanks(context, generator.masks)
    branches = [_branch(generator, blanks, list(range(len(blanks))), answers, end) for answers in candidates]
    if generator.max_positions is not None:
        _check(len(context), branches, generator.max_positions + generator.in_blocks)


class _Branch(NamedTuple):
    """A candidate as the model reads it: lists of one length, and what its answers are."""

    tokens: list[int]
    text_positions: list[int]
    block_positions: list[int]
    targets: list[int]  # what follows each token
    scored: list[bool]  # whether that is scored
    order: list[int]  # the blanks' numbers as they are filled
    answers: list[list[int]]  # in this order, with the end token where it is scored


@dataclass
class _Row:
    """A context with candidates behind it."""

    context_number: int
    context: list[int]
    numbers: list[int]  # of the candidates
    branches: list[_Branch]
    first_owner: int = 1  # 0 where all other branches see the first

    @property
    def length(self) -> int:
        return len(self.context) + sum(len(branch.tokens) for branch in self.branches)


def _branch(
    generator: BlankGenerator, blanks: list[int], order: list[int], given: Sequence[Sequence[int]], end: bool
) -> _Branch:
    """One candidate's answers, in the order in which the model reads them."""
    if len(given) != len(blanks):
        raise UserError(f"{len(given)} answers for {len(blanks)} blanks; give one for each")
    branch = _Branch([], [], [], [], [], order, [])
    for number in order:
        answer = list(map(int, given[number]))
        if end and not (answer and answer[-1] in generator.ends):
            answer.append(generator.ends[0])
        words = answer[:-1] if answer and answer[-1] in generator.ends else answer
        if any(token in generator.ends for token in words):
            raise UserError(f"an answer to blank {number + 1} holds an end token before its end; remove it")
        length = len(words) + 1  # with the start token
        branch.tokens.extend([generator.sop, *words])
        branch.text_positions.extend([blanks[number]] * length)
        branch.block_positions.extend(range(1, length + 1) if generator.in_blocks else [1] * length)
        # An answer that is scored without its end predicts nothing behind its last token.
        branch.targets.extend(answer if len(answer) == length else [*answer, generator.ends[0]])
        branch.scored.extend([True] * len(answer) + [False] * (length - len(answer)))
        branch.answers.append(answer)
    return branch


def _check(context_length: int, branches: Sequence[_Branch], num_rows: int) -> None:
    """Refuses what the position tables, of `num_rows` rows, do not reach."""
    if context_length > num_rows:
        raise UserError(
            f"the prompt is {context_length} tokens long, but the model has {num_rows} positions; "
            "shorten the prompt, or cut it with truncate (--truncate)"
        )
    longest = max((max(branch.block_positions, default=0) for branch in branches), default=0)
    if longest >= num_rows:
        raise UserError(
            f"an answer is {longest - 1} tokens long, but the model has positions for {num_rows - 2}; shorten it"
        )


def _rows(number: int, context: list[int], branches: Sequence[_Branch]) -> Iterator[_Row]:
    """The candidates of one context, dealt to rows."""
    row = _Row(number, context, [], [])
    for index, branch in enumerate(branches):
        if row.branches and row.length + len(branch.tokens) > 2 * len(context):
            yield row
            row = _Row(number, context, [], [])
        row.numbers.append(index)
        row.branches.append(branch)
    if row.branches:
        yield row


def _batches(rows: list[_Row]) -> Iterator[list[_Row]]:
    """Rows of like length together, the longest first."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        longest = batch[0].length if batch else row.length
        size = len(batch) + 1
        if batch and (size * longest > MAX_TOKENS or size * longest**2 > MAX_PAIRS):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _target_logprobs(generator: BlankGenerator, rows: Sequence[_Row]) -> list[float]:
    """Log-probabilities of all scored tokens, row by row, as they stand there."""
    model, length = generator.model, rows[0].length
    device = next(model.parameters()).device
    owners = torch.full((len(rows), length), -1, dtype=torch.int64)
    targets = torch.full((len(rows), length), -1, dtype=torch.int64)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    positions = torch.zeros(len(rows), 2, length, dtype=torch.int64)
    for index, row in enumerate(rows):
        start = len(row.context)
        tokens[index, :start] = torch.tensor(row.context)
        positions[index, 0, :start] = torch.arange(start)
        owners[index, :start] = 0
        for owner, branch in enumerate(row.branches, start=row.first_owner):
            part = slice(start, start + len(branch.tokens))
            tokens[index, part] = torch.tensor(branch.tokens, dtype=torch.int64)
            positions[index, 0, part] = torch.tensor(branch.text_positions, dtype=torch.int64)
            positions[index, 1, part] = torch.tensor(branch.block_positions, dtype=torch.int64)
            owners[index, part] = owner
            wanted = torch.tensor(branch.targets, dtype=torch.int64)
            targets[index, part] = wanted.where(torch.tensor(branch.scored, dtype=torch.bool), -1)
            start = part.stop
    contexts = torch.tensor([len(row.context) for row in rows])
    tokens, positions, owners, targets, contexts = (
        one.to(device) for one in (tokens, positions, owners, targets, contexts)
    )
    hidden = _read(generator, tokens, positions, owners, contexts)  # [B, T, H]
    chosen = targets != -1
    found = [
        _logprobs(model.head(part), ids)
        for part, ids in zip(hidden[chosen].split(LOGITS_AT_ONCE), targets[chosen].split(LOGITS_AT_ONCE), strict=True)
    ]
    values: list[float] = torch.cat(found).tolist() if found else []
    if not all(map(math.isfinite, values)):
        raise not_finite()
    return values


def _read(
    generator: BlankGenerator, tokens: Tensor, positions: Tensor, owners: Tensor, context_lengths: Tensor
) -> Tensor:
    """Final hidden states [B, T, H] of contexts with branches.

    Args:
        generator: whose model reads.
        tokens: int64 [B, T].
        positions: int64 [B, 2, T].
        owners: int64 [B, T]: 0 what all behind it see; above, branches, which see themselves; -1 padding.
        context_lengths: int64 [B], leading tokens that all see.
    """
    model = generator.model
    places = torch.arange(tokens.size(1), device=tokens.device)
    attend = MaskedAttention(Visibility(prefix=context_lengths, branches=owners).boolean(places, places))
    hidden = model.embed(tokens, position_ids=positions)  # [B, T, H]
    for layer in model.layers:
        hidden = layer(hidden, attend)
    return model.finish(hidden)  # type: ignore[no-any-return]


def _logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits [n, V], ids [n] -> [n] float32; of the likeliest token where the id is LIKELIEST."""
    logprobs = logits.float().log_softmax(-1)
    given = logprobs.gather(1, ids.clamp(min=0)[:, None])[:, 0]
    return torch.where(ids == LIKELIEST, logprobs.amax(-1), given)


def _answers(generator: BlankGenerator, branch: _Branch, values: list[float]) -> list[Answer]:
    """A candidate's answers from left to right."""
    remaining, found = iter(values), {}
    for number, answer in zip(branch.order, branch.answers, strict=True):
        own = [next(remaining) for _ in answer]
        tokens = answer[:-1] if answer and answer[-1] in generator.ends else answer
        score = sum(own) / max(len(own), 1) ** generator.config.length_penalty
        found[number] = Answer(tokens, own, score)
    return [found[number] for number in range(len(found))]
