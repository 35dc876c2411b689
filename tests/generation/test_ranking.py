"""The greatest scores, with ties, against a stable sort."""

from __future__ import annotations

import pytest
import torch

from ftk.generation.search import ranking
from ftk.generation.search.ranking import stable_topk

SIZES = [20, 100, 5000]


def tied(name: str, size: int) -> torch.Tensor:
    """[4, size] with many equal scores."""
    generator = torch.Generator().manual_seed(size)
    scores = torch.randn(4, size, generator=generator)
    if name == "equal":
        return torch.zeros(4, size)
    if name == "rounded":  # as logits of a bfloat16 model
        return (scores * 4).bfloat16().float()
    if name == "steps":
        return scores.round()
    if name == "forbidden":  # all but a few
        return scores.masked_fill(torch.rand(4, size, generator=generator) < 1 - 4 / size, float("-inf"))
    return scores


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["equal", "rounded", "steps", "forbidden", "different"])
@pytest.mark.parametrize("looks", [True, False])  # on a GPU it is never asked whether there is a tie
def test_it_is_the_head_of_a_stable_sort(size, name, looks, monkeypatch):
    monkeypatch.setattr(ranking, "reads_are_free", lambda device: looks)
    scores = tied(name, size)
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    for count in (1, 3, 8, size // 2, size - 1, size):
        found, places = stable_topk(scores, count)
        assert torch.equal(places, indices[:, :count]), count
        assert torch.equal(found, values[:, :count])


def test_broken_scores_come_out_as_they_are():
    scores = torch.zeros(2, 50)
    scores[0, 7] = float("nan")
    values, indices = stable_topk(scores, 5)
    assert indices[0].tolist() == [7, 0, 1, 2, 3]
    assert values[0].isnan().tolist() == [True, False, False, False, False]
    assert indices[1].tolist() == [0, 1, 2, 3, 4]
    assert stable_topk(torch.full((1, 9), float("nan")), 4)[0].isnan().all()
