"""Which chunks are read together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ftk.generation import SequenceGenerator
from ftk.generation.decoder import CachedDecoder
from ftk.generation.reading import parts
from tests.generation.slow import SPECIAL, small_model


def cost(split, lengths, call_tokens):
    return sum(call_tokens + len(part) * max(lengths[number] for number in part) for part in split)


def all_splits(numbers):
    """Every way to put these into sets."""
    if not numbers:
        yield []
        return
    first, *rest = numbers
    for size in range(len(rest) + 1):
        for chosen in itertools.combinations(rest, size):
            others = [number for number in rest if number not in chosen]
            for split in all_splits(others):
                yield [[first, *chosen], *split]


@pytest.mark.parametrize("call_tokens", [0, 1, 16, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_no_other_split_costs_less(call_tokens, seed):
    lengths = np.random.default_rng(seed).integers(1, 60, 7).tolist()
    split = parts(lengths, call_tokens)
    assert sorted(number for part in split for number in part) == list(range(7))
    assert cost(split, lengths, call_tokens) == min(
        cost(one, lengths, call_tokens) for one in all_splits(list(range(7)))
    )


def test_alike_chunks_are_one_part():
    assert parts([5, 5, 5], 1) == [[0, 1, 2]]
    assert parts([3], 16) == [[0]]
    assert parts([200, 4, 190, 5], 16) == [[0, 2], [3, 1]]
    assert parts([4, 200], 10_000) == [[1, 0]]


def test_rows_in_flight_read_long_and_short_contexts_apart(monkeypatch):
    reads = []
    read = CachedDecoder.read

    def watched(self, rows, chunks):
        reads.append(sorted(len(chunk.tokens) for chunk in chunks))
        return read(self, rows, chunks)

    monkeypatch.setattr(CachedDecoder, "read", watched)
    contexts = [[7, 3, 8], [9] * 39 + [3], [10, 3], [11] * 37 + [3]]
    answers = {}
    for in_flight in (True, False):
        reads.clear()
        generator = SequenceGenerator(small_model(), SPECIAL, max_len=5, in_flight=in_flight, batch_size=4)
        answers[in_flight] = [[answer.tokens for answer in row] for row in generator.fill_ids(contexts)]
        assert reads[0] == ([39, 41] if in_flight else [3, 4, 39, 41])
    assert answers[True] == answers[False]
