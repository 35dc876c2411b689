"""Chunks that are read padded or packed: the same logits, caches and hidden states, and packed without padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ftk.generation.blanks import context_chunk, next_chunk
from ftk.generation.decoder import CachedDecoder
from ftk.generation.hidden_states import HiddenStates
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation.slow import SPECIAL, small_model

SOP, DEVICE = SPECIAL.sop, torch.device("cpu")


def decoder(packed):
    return CachedDecoder(small_model(), 5, 1, 40, 8, DEVICE, states=HiddenStates(5, 40), packed=packed)


@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_packed_is_what_padded_is(seed):
    random = np.random.default_rng(seed)
    contexts = [random.integers(6, 20, size).tolist() for size in random.integers(2, 24, 4)]
    rows, logits = random.permutation(5)[:4].tolist(), {}
    one, other = decoder(packed=False), decoder(packed=True)
    for each in (one, other):
        each.enter(rows[:3], [len(context) for context in contexts[:3]])
        first = each.read(rows[:3], [context_chunk(context, SOP, 1) for context in contexts[:3]])
        steps = [each.step(torch.full((5, 1), 7)) for _ in range(3)]
        # A row that goes on behind what it holds, beside one that begins.
        each.leave([rows[0]])
        each.enter([rows[3]], [len(contexts[3])])
        later = [next_chunk([7, 7], 1, SOP, 0, True), context_chunk(contexts[3], SOP, 0)]
        second = each.read([rows[0], rows[3]], later)
        steps += [each.step(torch.full((5, 1), 9)) for _ in range(2)]
        logits[each] = first, second, *(step[rows if n > 2 else rows[:3]] for n, step in enumerate(steps))
    torch.testing.assert_close(logits[other], logits[one], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(other.caches, one.caches, strict=True):
        torch.testing.assert_close(mine.read(5, 40), theirs.read(5, 40), rtol=1e-5, atol=1e-5)
    assert torch.equal(other.states.there, one.states.there)
    torch.testing.assert_close(other.states.buffer, one.states.buffer, rtol=1e-5, atol=1e-5)


def test_rows_in_flight_read_no_padding(monkeypatch):
    model = small_model()
    shapes, embed = [], model.embed

    def watched(tokens, **inputs):
        shapes.append(tuple(tokens.shape))
        return embed(tokens, **inputs)

    monkeypatch.setattr(model, "embed", watched)
    contexts = [[7, 3, 8], [9] * 39 + [3], [10, 3], [11] * 37 + [3]]
    answers = {}
    for in_flight in (True, False):
        shapes.clear()
        generator = BlankGenerator(model, SPECIAL, max_len=5, in_flight=in_flight, batch_size=4)
        answers[in_flight] = [[answer.tokens for answer in row] for row in generator.fill_ids(contexts)]
        assert shapes[0] == ((1, 4 + 41 + 3 + 39) if in_flight else (4, 41))
    assert answers[True] == answers[False]
