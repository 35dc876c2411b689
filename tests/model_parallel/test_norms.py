"""Norms of large tensors: right to float32's last digits, and the same however a tensor is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ftk.model_parallel.gradients import GlobalGradients
from ftk.model_parallel.norms import norms, square_sums
from ftk.model_parallel.shards import sum_over_dimension
from ftk.model_parallel.world import World
from tests.distributed import run_ranks


def exact(*tensors: Tensor) -> float:
    return sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5


@pytest.mark.parametrize("shape", [(8064, 512), (1 << 16,), ((1 << 16) + 1,), (1023,), (1025,), (1,), (0,), ()])
def test_the_norm_of_a_tensor_of_any_size_is_exact(shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for numbers in (tensor, torch.full(shape, 0.37)):  # sums of like numbers are rounded the same way all along
        found = square_sums([numbers])
        assert found.dtype == torch.float64
        assert found.sqrt().item() == pytest.approx(exact(numbers), rel=5e-7)


def test_tensors_keep_their_order_and_layout():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, 300, generator=generator) * n for n in (1000, 1, 0, 500)]
    tensors.append(torch.randn(400, 300, generator=generator).T)
    found = norms(tensors, tensors)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([exact(tensor) for tensor in tensors], rel=5e-7)


def test_what_is_not_finite_stays_so_and_large_squares_do_not():
    for bad in (float("nan"), float("inf"), float("-inf")):
        tensor = torch.zeros(300, 300)
        tensor[200, 7] = bad
        assert not norms([tensor], [tensor]).isfinite()
    # Each row's norm is a float32, and so are all together; the sum of their squares would not be.
    large = torch.full((1 << 20,), 5e16)
    assert norms([large, large[:5]], [large, large[:5]]).tolist() == pytest.approx([5.12e19, 5**0.5 * 5e16], rel=5e-7)


def test_numbers_of_half_precision_are_not_rounded_on_the_way():
    tensor = torch.randn(3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert square_sums([tensor]).sqrt().item() == pytest.approx(exact(tensor), rel=5e-7)


def over_a_mesh_without_names() -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(3000.0).view(60, 50)
    cut = [distribute_tensor(whole, mesh, [placement]) for placement in (Shard(0), Shard(1), Replicate())]
    sums = sum_over_dimension(cut[1].to_local().sum(-1), cut[1], -1)
    return [*norms([tensor.to_local() for tensor in cut], cut).tolist(), (sums - whole.sum(-1)).abs().max().item()]


def test_a_mesh_needs_no_names():
    whole = exact(torch.arange(3000.0))
    for found in run_ranks(over_a_mesh_without_names, 2):
        assert found == pytest.approx([whole, whole, whole, 0.0], rel=5e-7)


def test_the_gradient_norm_of_a_whole_embedding_is_that_of_its_halves():
    """As one process and two see it: torch's own norm of the whole is off by more than 1e-5 on a CPU with AVX2."""
    grad = torch.randn(50304, 128, generator=torch.Generator().manual_seed(0))

    def gnorm(*grads: Tensor) -> float:
        model = nn.ParameterList([nn.Parameter(torch.empty_like(grad)) for grad in grads])
        for parameter, own in zip(model, grads, strict=True):
            parameter.grad = own
        return GlobalGradients(model, model.parameters(), World.single()).norm().item()

    assert gnorm(grad) == pytest.approx(exact(grad), rel=2e-7)
    assert gnorm(grad) == pytest.approx(gnorm(*grad.chunk(2)), rel=2e-7)
