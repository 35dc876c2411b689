"""Scores continuations that are given instead of found: the log-probability of each token, in one forward."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ftk.generation.engine.around import wraps_of
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.prefix_cache import MIN_SHARED_TOKENS, CachedText
from ftk.generation.engine.reading import to_device
from ftk.generation.engine.request import NOT_SCORED, Branch, Frame, Framing, Request, check_ids, check_source
from ftk.generation.engine.sources import beside_sources
from ftk.generation.search import not_finite
from ftk.models.base import windows_of
from ftk.modules.adapters.side_by_side import choice_of
from ftk.modules.attention import Front, by_window
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.modules.masked_attention import MaskedAttention, fused_attention
from ftk.modules.masks import Visibility

MAX_TOKENS = 8192
"""Tokens, padding counted, that go through the model at once; a longer row goes alone."""

MAX_TOKENS_OF_CPU = 1024
"""The same on a CPU, whose caches hold what the layers make of so few; a GPT-2 is 1.4 times as fast as with 8192."""

KEYS_PER_TOKEN = 16
"""So many times as many keys: each row of a batch has a copy of what it begins with."""

MAX_PAIRS = 2**25
"""Pairs of tokens in the masks of a batch: what bounds a batch of long rows."""

LOGITS_AT_ONCE = 512
"""Rows of the output layer at a time, so that memory does not grow with the vocabulary times the answers."""


class Scored(NamedTuple):
    """The targets of one continuation that are scored, in their order.

    Attributes:
        logprobs: natural logarithms of their probabilities.
        best: the same of the likeliest tokens in their places.
        likeliest: these tokens, where they are known.
    """

    logprobs: list[float]
    best: list[float]
    likeliest: Sequence[int] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether greedy search would have found it: each target is as likely as the likeliest."""
        return self.logprobs == self.best


@torch.inference_mode()
def score(
    model: Any,
    framing: Framing,
    requests: Sequence[Request],
    continuations: Sequence[Sequence[Any]],
    progress: Callable[[int], object] | None = None,
) -> list[list[Scored]]:
    """Log-probabilities of continuations, as an engine would have found them on the way there.

    The continuations of one request stand side by side behind one copy of its first frame, seeing it and themselves, as
    long as they have no more tokens than the frame: beyond that the pairs of tokens that do not see each other would
    cost more than they save. Of requests that begin alike, as questions behind the same examples do, the beginning
    is read once (`_groups`).

    Args:
        model: computes; in evaluation mode meanwhile.
        requests: N; their options and processors are not used.
        continuations: for each request any number, as `Framing.branch` understands them.
        progress: called with the number of requests that have been scored since the last call.

    Returns:
        what was found for each request and continuation.

    Raises:
        UserError: a log-probability is NaN or infinite; the model does not know a token; as `Framing.branch`.
    """
    rows: list[_Row] = []
    for number, (request, given) in enumerate(zip(requests, continuations, strict=True)):
        frame = framing.first(request)
        branches = [_needed(framing.branch(request, continuation)) for continuation in given]
        check_ids(model, frame.tokens[frame.own :])
        check_source(model, frame.source)
        for branch in branches:
            check_ids(model, [*branch.tokens, *(target for target in branch.targets if target != NOT_SCORED)])
        rows += _rows(number, frame, branches)
    found: list[list[list[Any]]] = [[[] for _ in given] for given in continuations]
    waiting = Counter(row.request for row in rows)
    progress = progress or (lambda count: None)
    progress(len(requests) - len(waiting))  # those without a continuation
    for batch, values in _scored_batches(model, rows, [request.adapter for request in requests]):
        for row in batch:
            for number, branch in zip(row.numbers, row.branches, strict=True):
                found[row.request][number] += itertools.islice(values, len(_scored_places(branch)))
            waiting[row.request] -= 1
        progress(sum(waiting[number] == 0 for number in {row.request for row in batch}))
    return [
        [Scored(*([value[part] for value in targets] for part in range(3))) for targets in of_one] for of_one in found
    ]


@dataclass
class _Row:
    """A frame, or all but its last token, with branches behind it."""

    request: int
    frame: Frame
    num_shared: int  # tokens of the frame
    numbers: list[int]  # of the continuations
    branches: list[Branch]
    start: int = 0  # leading tokens of the frame that are read once for a group of rows

    @property
    def length(self) -> int:
        return self.num_shared - self.start + sum(len(branch.tokens) for branch in self.branches)


def _needed(branch: Branch) -> Branch:
    """The branch without the tokens behind its last scored target: nothing that is asked follows on them."""
    last = max(_scored_places(branch), default=0)
    return branch._replace(tokens=branch.tokens[: last + 1 + branch.offset])


def _rows(number: int, frame: Frame, branches: Sequence[Branch]) -> Iterator[_Row]:
    """The continuations of one request, dealt to rows."""
    if not branches:
        return
    num_shared = len(frame.tokens) - 1 - branches[0].offset
    row = _Row(number, frame, num_shared, [], [])
    for index, branch in enumerate(branches):
        if row.branches and row.length + len(branch.tokens) > 2 * num_shared + len(frame.source):
            yield row
            row = _Row(number, frame, num_shared, [], [])
        row.numbers.append(index)
        row.branches.append(branch)
    yield row


def _scored_batches(
    model: Any, rows: Sequence[_Row], adapters: Sequence[str | None]
) -> Iterator[tuple[list[_Row], Iterator[Any]]]:
    """The rows in batches, with the values of all their scored targets; `adapters` of each request."""
    device, choice = next(model.parameters()).device, choice_of(model)
    max_tokens = min(MAX_TOKENS, MAX_TOKENS_OF_CPU) if device.type == "cpu" else MAX_TOKENS
    for group in _groups(rows, adapters):
        lead = None
        for batch in _batches(group, max_tokens):
            if choice is not None:
                choice.take([choice.number(adapters[row.request]) for row in batch], device)
            with evaluation_mode(model):
                if batch[0].start and lead is None:
                    lead = _read_lead(model, batch[0])
                values = zip(*_target_logprobs(model, batch, lead), strict=True)
            yield batch, values


def _groups(rows: Sequence[_Row], adapters: Sequence[str | None]) -> Iterator[list[_Row]]:
    """Rows that share at least half of their frames, which then `start` behind it; all others are one group.

    Args:
        adapters: of each request.
    """
    others: list[_Row] = []
    texts: list[_Row] = []
    for row in rows:
        frame = row.frame
        is_text = frame.prefix == 0 and len(frame.source) == 0 and frame.inputs.keys() == {"position_ids"}
        (texts if is_text else others).append(row)
    texts.sort(key=lambda row: (adapters[row.request] or "", list(row.frame.tokens)))
    while texts:
        group, common = _with_common_start(texts, adapters)
        texts = texts[len(group) :]
        if len(group) == 1:
            others += group
            continue
        for row in group:
            row.start = common
        yield group
    if others:
        yield others


def _with_common_start(rows: Sequence[_Row], adapters: Sequence[str | None]) -> tuple[list[_Row], int]:
    """The first rows that share at least half of their frames, and how many tokens that is."""
    first, group = rows[0], [rows[0]]
    text = CachedText.of(first.frame, 0)
    longest, common = first.num_shared, first.num_shared - 1  # the last token's hidden state is needed
    for row in rows[1:]:
        longest = max(longest, row.num_shared)
        shared = min(common, row.num_shared - 1, text.common(CachedText.of(row.frame, 0)))
        if adapters[row.request] != adapters[first.request] or shared < max(MIN_SHARED_TOKENS, longest / 2):
            break
        group.append(row)
        common = shared
    return group, common


class _Lead(NamedTuple):
    """What rows of a group have in common, read.

    Attributes:
        layers: of each layer keys and values, [1, K, L, D].
        positions: int64 [1, L] of the tokens.
        has_bias: whether the model adds a bias to the scores, which goes by positions.
    """

    layers: list[tuple[Tensor, Tensor]]
    positions: Tensor
    has_bias: bool


def _read_lead(model: Any, row: _Row) -> _Lead:
    """The tokens of a row's frame up to its start."""
    frame, length = row.frame.part(0, row.start), row.start
    decoder = CachedDecoder(model, 1, 1, length, 0)
    decoder.read([0], [frame])
    positions = to_device(np.asarray(frame.inputs["position_ids"])[None], decoder.device)
    return _Lead([cache.row(0, length) for cache in decoder.caches], positions, decoder.has_bias)


def _batches(rows: list[_Row], max_tokens: int) -> Iterator[list[_Row]]:
    """Rows of like length together, the longest first."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        longest = max(member.length + len(member.frame.source) for member in (*batch[:1], row))
        size = len(batch) + 1
        num_keys = size * (row.start + longest)
        too_many = size * longest > max_tokens or num_keys > KEYS_PER_TOKEN * max_tokens
        if batch and (too_many or num_keys * longest > MAX_PAIRS):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _scored_places(branch: Branch) -> list[int]:
    """Which of its targets are scored."""
    return [place for place, target in enumerate(branch.targets) if target != NOT_SCORED]


def _target_logprobs(
    model: Any, rows: Sequence[_Row], lead: _Lead | None
) -> tuple[list[float], list[float], list[int]]:
    """Log-probabilities of all scored targets, row by row, as they stand there, and of the likeliest tokens; these."""
    device = next(model.parameters()).device
    tokens, inputs, owners, places, targets = _packed(rows)
    prefix = np.array([row.frame.prefix for row in rows])
    on_device = {name: to_device(array, device) for name, array in inputs.items()}
    if lead is not None:
        owners = np.pad(owners, ((0, 0), (rows[0].start, 0)))
    visibility = Visibility(prefix=to_device(prefix, device), branches=to_device(owners, device))
    sources = [row.frame.source for row in rows] if hasattr(model, "encode") else None
    hidden = final_hidden_states(model, to_device(tokens, device), on_device, visibility, sources, lead)
    hidden = hidden.flatten(0, 1)  # [B T, H]
    hidden = hidden[to_device(np.array(places, np.int64), device)]  # [N, H]
    ids = to_device(np.array(targets, np.int64), device)
    found = [
        _logprobs(model.head(part), part_ids)
        for part, part_ids in zip(hidden.split(LOGITS_AT_ONCE), ids.split(LOGITS_AT_ONCE), strict=True)
    ]
    logprobs, best, likeliest = (torch.cat(parts).tolist() for parts in zip(*found, strict=True))
    if not all(map(math.isfinite, logprobs)):
        raise not_finite()
    return logprobs, best, likeliest


def _packed(rows: Sequence[_Row]) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray, list[int], list[int]]:
    """Rows as the model reads them: each has its frame, behind its start, and its branches; the first is the longest.

    Returns:
        tokens int64 [B, T]; inputs int64 [B, .., T]; owners int64 [B, T], 0: the frame, which all see, 1, 2, ...: a
        branch, -1: padding; places [N] in the flattened [B T] hidden states, and the targets [N] that are scored there.
    """
    length = rows[0].length
    tokens = np.zeros((len(rows), length), np.int64)
    shapes = {name: array.shape[:-1] for name, array in rows[0].frame.inputs.items()}
    inputs = {name: np.zeros((len(rows), *shape, length), np.int64) for name, shape in shapes.items()}
    owners = np.full((len(rows), length), -1, np.int64)
    places: list[int] = []
    targets: list[int] = []
    for line, row in enumerate(rows):
        shared = row.frame.part(row.start, row.num_shared)
        start = len(shared.tokens)
        parts = [(shared.tokens, shared.inputs), *((branch.tokens, branch.inputs) for branch in row.branches)]
        end = 0
        for owner, (own_tokens, own_inputs) in enumerate(parts):
            part = slice(end, end + len(own_tokens))
            end = part.stop
            tokens[line, part] = own_tokens
            owners[line, part] = owner
            for name, array in own_inputs.items():
                inputs[name][line, ..., part] = array[..., : len(own_tokens)]
        for branch in row.branches:
            for place in _scored_places(branch):
                # The first target of a branch that stands behind the whole frame follows the frame's last token.
                follows = len(shared.tokens) - 1 if place + branch.offset < 0 else start + place + branch.offset
                places.append(line * length + follows)
                targets.append(branch.targets[place])
            start += len(branch.tokens)
    return tokens, inputs, owners, places, targets


def final_hidden_states(
    model: Any,
    tokens: Tensor,
    inputs: dict[str, Tensor],
    visibility: Visibility,
    sources: Sequence[Sequence[int]] | None = None,
    lead: _Lead | None = None,
) -> Tensor:
    """Final hidden states [B, T, H].

    Args:
        tokens: int64 [B, T].
        inputs: others, by name.
        visibility: without the windows of the layers; where there is a lead, of it and the tokens.
        sources: what the encoder reads of each row; None where there is none.
        lead: what stands in front of all rows.
    """
    positions, start = inputs.get("position_ids"), 0
    if lead is not None and positions is not None:
        start = lead.positions.size(1)
        positions = torch.cat((lead.positions.expand(len(tokens), start), positions), dim=1)  # [B, L + T]
    places = torch.arange(start + tokens.size(1), device=tokens.device)
    masks: dict[int | None, Tensor] = {}
    windows = windows_of(getattr(model, "config", None))
    for window in windows:
        seen = visibility
        if window is not None:  # branches stand side by side: their places are not their positions
            seen = visibility._replace(window=window, positions=positions)
        masks[window] = seen.boolean(places[start:], places)
    around = wraps_of(model, inputs, positions if lead is not None and lead.has_bias else None)
    attends: Sequence[Any]
    if lead is None:
        attend: Any = around(by_window(windows, lambda window: MaskedAttention(masks[window])))
        if sources is not None:
            attend = beside_sources(model, attend, sources, tokens.device)
        attends = [attend] * len(model.layers)
    else:
        attends = [around(by_window(windows, partial(_Behind, *layer, masks))) for layer in lead.layers]
    hidden = model.embed(tokens, **inputs)  # [B, T, H]
    for layer, own in zip(model.layers, attends, strict=True):
        hidden = layer(hidden, own)
    return model.finish(hidden)  # type: ignore[no-any-return]


class _Behind(NamedTuple):
    """An `Attend` of rows of T tokens to what all of them begin with, and to themselves."""

    key: Tensor  # [1, K, L, D]
    value: Tensor
    masks: Mapping[int | None, Tensor]  # window -> [B, 1, T, L + T]
    window: int | None
    front: Front | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """query [B, A, T, D], key, value [B, K, T, D] -> [B, A, T, D]"""
        num_rows = query.size(0)
        key = torch.cat((self.key.expand(num_rows, -1, -1, -1), key), dim=2)
        value = torch.cat((self.value.expand(num_rows, -1, -1, -1), value), dim=2)
        mask = self.masks[self.window]
        return fused_attention(query, key, value, mask, bias=bias, scale=scale, front=self.front)


def _logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, V], ids [n] -> float32 [n] of the given token and of the likeliest; int64 [n], the likeliest."""
    logprobs = logits.float().log_softmax(-1)
    best, likeliest = logprobs.max(-1)
    return logprobs.gather(1, ids[:, None])[:, 0], best, likeliest
