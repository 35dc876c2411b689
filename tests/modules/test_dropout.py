"""Our dropout drops what it says, keeps the mean, repeats with the seed, and keeps a byte a value for the backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ftk.modules.dropout import Dropout, dropout, dropout_matmul


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


def plain_dropout(values: Tensor, p: float) -> Tensor:
    """The same in operators of which autograd keeps a factor for each value."""
    steps = round((1.0 - p) * 2**16)
    words = torch.empty(-(-values.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    numbers = words.view(torch.int16)[: values.numel()].view(values.shape)
    return values * (numbers < steps - 2**15).to(values.dtype).mul_(2**16 / steps)


def scores_and_values(dtype: torch.dtype) -> list[Tensor]:
    """[B, A, T, S] and [B, A, S, D], the latter as a layer gives it."""
    scores, values = torch.randn(2, 3, 8, 6).to(dtype), torch.randn(2, 6, 3, 4).to(dtype)
    return [scores.requires_grad_(), values.requires_grad_()]


def product(dropped: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda scores, values: dropped(scores.softmax(-1), 0.3) @ values.transpose(1, 2)


def own_product(scores: Tensor, values: Tensor) -> Tensor:
    return dropout_matmul(scores.softmax(-1), values.transpose(1, 2), 0.3)


WAYS = [  # to the bit, but where autocast rounds
    (torch.float32, False, 0.0),
    (torch.bfloat16, False, 0.0),
    (torch.bfloat16, True, 0.0),
    (torch.float32, True, 0.03),
]


@pytest.mark.parametrize(("dtype", "autocast", "tolerance"), WAYS)
def test_it_equals_the_plain_way(dtype: torch.dtype, autocast: bool, tolerance: float) -> None:
    inputs = scores_and_values(dtype)
    results = []
    for way in product(plain_dropout), product(dropout), own_product:
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = way(*inputs)
        results.append([result, *torch.autograd.grad(result, inputs, torch.ones_like(result)), torch.rand(())])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=tolerance, atol=tolerance)


def kept_bytes(compute: Callable[[], Tensor]) -> int:
    """What autograd keeps for the backward pass, each storage once."""
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_byte_is_kept_for_each_value(dtype: torch.dtype) -> None:
    scores, values = scores_and_values(dtype)
    assert kept_bytes(lambda: dropout(scores, 0.3)) in range(scores.numel(), scores.numel() + 64)
    size = (scores.numel() + values.numel()) * dtype.itemsize + scores.numel()
    assert kept_bytes(lambda: own_product(scores, values)) in range(size, size + 64)


def test_gradients_have_gradients() -> None:
    def repeated(scores: Tensor, values: Tensor) -> Tensor:
        torch.manual_seed(3)
        return own_product(scores, values)

    inputs = [torch.randn(2, 2, 3, 3, dtype=torch.float64), torch.randn(2, 3, 2, 2, dtype=torch.float64)]
    assert torch.autograd.gradgradcheck(repeated, [each.requires_grad_() for each in inputs])


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
    compiled = torch.compile(dropout_matmul, backend="aot_eager", fullgraph=True)
    assert set(compiled(torch.ones(8, 1), torch.ones(1, 4), 0.5).flatten().tolist()) <= {0.0, 2.0}
