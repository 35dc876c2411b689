"""Samples of masked_lm, span_corruption and denoising one by one in plain NumPy, as published code makes them.

Each takes the text of a sample and the options of ftk's task, and draws from NumPy's generator. The steps are those of
fairseq's MaskTokensDataset, of T5's random_spans_noise_mask and of fairseq's DenoisingDataset.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftk.tasks.pieces import CONTINUES, Tokens

Arrays = dict[str, NDArray[Any]]


def masked(text: NDArray[np.int64], tokens: Tokens, random: np.random.Generator, config: Any) -> Arrays:
    """RoBERTa's masks."""
    size = len(text)
    chosen = np.zeros(size, dtype=bool)
    count = int(config.mask_prob * size + random.random())
    chosen[random.choice(size, count, replace=False)] = True
    draws = random.random(size)
    others = chosen & (draws < config.leave_unmasked_prob + config.random_token_prob)
    kept = others & (draws < config.leave_unmasked_prob)
    replaced = others & ~kept
    source = text.copy()
    source[chosen & ~kept] = tokens.mask
    source[replaced] = random.choice(tokens.others, int(replaced.sum()))
    return {"tokens": source, "targets": text, "loss_mask": chosen, "lengths": np.array(size)}


def span_corrupted(text: NDArray[np.int64], data: Any, random: np.random.Generator, config: Any) -> Arrays:
    """T5's spans."""
    size = len(text)
    hidden = min(max(int(np.round(size * config.noise_density)), 1), size - 1)
    spans = max(int(np.round(hidden / config.mean_span_length)), 1)

    def parted(total: int) -> NDArray[np.int64]:
        first = np.zeros(total - 1, dtype=np.int64)
        first[: spans - 1] = 1
        random.shuffle(first)
        return np.bincount(np.cumsum(np.concatenate(([0], first))), minlength=spans)

    runs = np.stack([parted(size - hidden), parted(hidden)], axis=1).ravel()
    starts = np.zeros(size, dtype=np.int64)
    starts[np.cumsum(runs)[:-1]] = 1
    is_hidden = np.cumsum(starts) % 2 == 1

    def with_sentinels(noise: NDArray[np.bool_]) -> NDArray[np.int64]:
        begins = noise & ~np.concatenate(([False], noise[:-1]))
        found = np.where(begins, data.sentinels[np.cumsum(begins) - 1], text)
        return np.append(found[~noise | begins], data.end)

    # T5 writes the kept runs as "noise" of the target: a sentinel stands for each, in front of the hidden one.
    return paired(with_sentinels(is_hidden), with_sentinels(~is_hidden), data.start)


def noisy(text: NDArray[np.int64], data: Any, random: np.random.Generator, config: Any) -> Arrays:
    """BART's noise: sentences permuted, and spans of words become one mask each."""
    tokens: Tokens = data.tokens
    source = text.copy()
    ends = data.sentence_ends[source].astype(bool)
    ends[-2] = True
    bounds = np.flatnonzero(ends[1:-1] & ~np.append(ends[2:-1], False)) + 2
    order = random.permutation(len(bounds))
    pieces = [text[(bounds[number - 1] if number else 1) : bounds[number]] for number in order]
    source[1:-1] = np.concatenate(pieces)

    is_start = tokens.kind[source] != CONTINUES
    is_start[[0, -1]] = False
    words = np.flatnonzero(is_start)
    budget = math.ceil(len(words) * config.mask_ratio)
    lengths = random.poisson(config.poisson_lambda, budget)
    while lengths.sum() < budget:
        lengths = np.concatenate((lengths, random.poisson(config.poisson_lambda, budget)))
    cumulative = np.cumsum(lengths)
    last = int(np.searchsorted(cumulative, budget))
    lengths = lengths[: last + 1]
    lengths[last] = budget - (cumulative[last - 1] if last else 0)
    inserts = int((lengths == 0).sum())
    lengths = lengths[lengths > 0]
    places = words[random.permutation(len(words))[: len(lengths)]]
    kept = np.ones(len(source), dtype=bool)
    source[places] = tokens.mask
    steps = is_start.astype(np.int64)
    steps[-1] = 1 << 20
    lengths = lengths - 1
    while len(places):
        lengths = lengths - steps[places + 1]
        places, lengths = places[lengths >= 0] + 1, lengths[lengths >= 0]
        kept[places] = False
    source = source[kept]
    if inserts:
        where = np.zeros(len(source) + inserts, dtype=bool)
        where[random.permutation(len(source) + inserts - 2)[:inserts] + 1] = True
        found = np.full(len(where), tokens.mask, dtype=np.int64)
        found[~where] = source
        source = found
    return paired(source, text, data.start)


def paired(source: NDArray[np.int64], target: NDArray[np.int64], start: int) -> Arrays:
    return {
        "tokens": source,
        "lengths": np.array(len(source)),
        "decoder_tokens": np.concatenate(([start], target[:-1])),
        "targets": target,
        "loss_mask": np.ones(len(target), dtype=bool),
    }
