"""Position bias: buckets as `transformers` counts them, and a part of a table as the whole."""

from __future__ import annotations

import pytest
import torch

from ftk.modules import position_bias
from ftk.modules.position_bias import PositionBias, _buckets


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (6, 4)])
def test_buckets_are_those_of_transformers(bidirectional, buckets, distance) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5", reason="needs transformers (pip install ftk[test])")
    table = PositionBias(buckets, 1, distance, bidirectional)
    with torch.no_grad():
        table.weight.copy_(torch.arange(buckets)[:, None])
        places = torch.arange(701)
        found = table.between(places[None], places[None])[0, 0].long()  # [T, S]
    relative = places[None] - places[:, None]
    expected = t5.T5Attention._relative_position_bucket(relative, bidirectional, buckets, distance)
    assert torch.equal(found, expected)


def test_one_query_among_all_keys_has_its_row_of_the_whole() -> None:
    table = PositionBias(32, 4, 128, bidirectional=False)
    places = torch.arange(300)[None]
    whole = table.between(places, places)  # [1, A, T, S]
    for place in (0, 7, 299):
        assert torch.equal(table.between(torch.tensor([[place]]), places)[0, :, 0], whole[0, :, place])


@pytest.mark.parametrize(("bidirectional", "distance", "times"), [(True, 37, 1), (False, 37, 1), (False, 1 << 19, 4)])
def test_buckets_are_made_once_for_all_steps_and_by_generation_for_training_too(
    bidirectional, distance, times, monkeypatch
) -> None:
    made = []
    monkeypatch.setattr(position_bias, "_buckets", lambda *about: made.append(about) or buckets(*about))
    buckets = _buckets
    table = PositionBias(12, 2, distance, bidirectional)  # sizes that no other test has
    with torch.inference_mode():
        first = table.between(torch.arange(9)[None], torch.arange(9)[None]).clone()
    for length in (9, 50, 9):
        places = torch.arange(length)[None]
        bias = table.between(places, places)
        bias.sum().backward()
        assert torch.equal(bias[..., :9, :9], first)
    assert len(made) == times  # a table of a million entries is not kept
    assert int(table.weight.grad[:, 0].sum()) == 2 * 81 + 50 * 50
