"""Hidden states of a decoder's rows: what is nearest to the newest token, against plain loops."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ftk.generation.hidden_states import HiddenStates
from ftk.modules.kv_cache import Places


def settle(states, row, hidden, start):
    count = hidden.size(0)
    numbers = torch.arange(count)
    states.settle(hidden[None], Places(torch.full((count,), row), start + numbers, torch.zeros_like(numbers), numbers))


def slow_nearest(last, settled, mask):
    return torch.stack([(one @ there[seen].T).amax(-1) for one, there, seen in zip(last, settled, mask, strict=True)])


def test_nearest_is_what_the_loops_find_and_follows_every_change():
    generator = torch.Generator().manual_seed(0)
    states = HiddenStates(4, 10)
    settle(states, 2, torch.randn(3, 6, generator=generator), 0)
    settle(states, 0, torch.randn(5, 6, generator=generator), 0)
    rows = torch.tensor([2, 0])
    own = states.of(rows)
    for step in range(4):
        hidden = torch.randn(3, 2, 6, generator=generator)
        states.look(hidden)
        assert torch.equal(own.last, F.normalize(hidden, dim=-1)[rows])
        torch.testing.assert_close(own.nearest, slow_nearest(own.last, own.settled, own.mask))
        if step == 0:  # a further blank begins behind what is there: it counts at once
            before = own.nearest.clone()
            settle(states, 0, hidden[0], 5)
            assert torch.allclose(own.nearest[1], torch.ones(2))
            assert torch.equal(own.nearest[0], before[0])
        elif step == 1:  # another prompt takes the row
            states.clear([0])
            settle(states, 0, torch.randn(1, 6, generator=generator), 0)
            torch.testing.assert_close(own.nearest, slow_nearest(own.last, own.settled, own.mask))
    torch.testing.assert_close(own.keep(torch.tensor([1])).nearest, own.nearest[1:])
