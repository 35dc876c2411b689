"""Our dropout drops what it says, keeps the mean, and repeats with the seed."""

from __future__ import annotations

import pytest
import torch

from ftk.modules.dropout import Dropout, dropout


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_share_and_scale(p: float) -> None:
    torch.manual_seed(0)
    dropped = dropout(torch.ones(1_000_003), p)
    share = (dropped == 0).float().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / 1_000_003) ** 0.5 + 1e-5
    kept = dropped[dropped != 0]
    assert (kept - 1 / (1 - p)).abs().max() < 2e-4 / (1 - p)
    assert dropped.mean().item() == pytest.approx(1, abs=5 * (p / (1 - p) / 1_000_003) ** 0.5)


@pytest.mark.parametrize("p", [0.25, 0.5])  # kept with a probability that 16 bits write exactly
def test_the_scale_is_exact_where_the_probability_is(p: float) -> None:
    assert set(dropout(torch.ones(1000), p).tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}


def test_neighbours_are_independent() -> None:
    """Four values share a random word; they must not share their fate."""
    torch.manual_seed(0)
    kept = (dropout(torch.ones(400_000), 0.5) != 0).float().view(-1, 4)
    assert (torch.corrcoef(kept.T) - torch.eye(4)).abs().max() < 0.02
    assert torch.corrcoef(torch.stack((kept[:-1, 3], kept[1:, 0])))[0, 1].abs() < 0.02


@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (2, 3, 7), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shape_and_type(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    result = dropout(torch.ones(shape, dtype=dtype), 0.3)
    assert (result.shape, result.dtype) == (torch.Size(shape), dtype)


def test_the_gradient_is_dropped_where_the_value_is() -> None:
    values = torch.randn(4, 8, 6).transpose(0, 2).requires_grad_()
    result = dropout(values, 0.4)
    (gradient,) = torch.autograd.grad(result.sum(), values)
    assert torch.equal(gradient == 0, result == 0)
    torch.testing.assert_close(result, values * gradient)


def test_the_seed_repeats_it() -> None:
    values = torch.ones(999)
    torch.manual_seed(5)
    first, second = dropout(values, 0.5), dropout(values, 0.5)
    torch.manual_seed(5)
    assert torch.equal(dropout(values, 0.5), first)
    assert not torch.equal(first, second)


def test_it_acts_in_training_only_and_not_at_zero() -> None:
    values = torch.randn(50)
    assert Dropout(0.5).eval()(values) is values
    assert Dropout(0.0)(values) is values
    assert not torch.equal(Dropout(0.5)(values), values)


def test_it_compiles_to_one_graph() -> None:
    torch.manual_seed(0)
    dropped = torch.compile(Dropout(0.5), backend="aot_eager", fullgraph=True)(torch.ones(1000))
    assert set(dropped.tolist()) == {0.0, 2.0}
