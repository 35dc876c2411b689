"""Processes that hold other values, or the same at other places, are found out; or given those of the first one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ftk.errors import UserError
from ftk.model_parallel.check_replicas import check_replicas, check_replicas_over_mesh, checksum, copy_from_first
from ftk.model_parallel.world import Sizes, make_world
from tests.distributed import run_ranks

ROW = 2**14  # of which weights are made


def swapped(values: Tensor, one: int, other: int) -> Tensor:
    places = torch.arange(values.numel())
    places[one], places[other] = other, one
    return values[places]


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(10.0),
        torch.tensor([1.0, 2.0, 2.0, 1.0, 0.0]),
        torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64),
        torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16),
        torch.tensor([1.0, 2.0, 4.0], dtype=torch.float16),
        torch.tensor([True, False, False]),
        torch.tensor([3, 1, 2], dtype=torch.uint8),
        torch.tensor([3, 1, 2]),
        torch.tensor([1 + 2j, 2 + 1j, 0j]),
    ],
    ids=lambda values: str(values.dtype).removeprefix("torch."),
)
def test_values_in_another_order_have_another_checksum(values):
    orders = {tuple(values[order].tolist()): values[order] for order in map(torch.randperm, [len(values)] * 50)}
    assert len({int(checksum(order)) for order in orders.values()}) == len(orders) > 1
    assert checksum(values) == checksum(values.clone())


@pytest.mark.parametrize("size", [ROW - 1, ROW, ROW + 1, 3 * ROW + 5, 64 * ROW, 65 * ROW + 7])
def test_places_far_apart_are_told_from_one_another(size):
    values = torch.arange(float(size))
    others = [swapped(values, 0, size - 1), swapped(values, size // 3, size // 2), values.roll(1), values.flip(0)]
    others += [values.roll(ROW)] if size > ROW else []
    assert checksum(values) not in [checksum(other) for other in others]


def test_the_shape_and_strides_of_like_values_do_not_matter():
    values = torch.arange(12.0)
    assert checksum(values) == checksum(values.view(3, 4)) == checksum(values.view(3, 4).T.contiguous().T)
    assert checksum(torch.empty(0, 3)) == 0
    assert checksum(torch.tensor(2.0)) == checksum(torch.tensor([2.0])) != checksum(torch.tensor(-2.0))


class Rows(nn.Module):
    def __init__(self, flipped: bool) -> None:
        super().__init__()
        values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(values.flip(0) if flipped else values)


def message_of(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except UserError as error:
        return str(error)
    return ""


def two_processes() -> dict[str, Any]:
    from ftk.model_parallel.tensor_parallel.sharding import distributed_parameter

    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    world = make_world(Sizes(replicate=2), "cpu")
    results: dict[str, Any] = {
        "alike": [
            message_of(check_replicas, Rows(False), world),
            message_of(check_replicas_over_mesh, Rows(False), mesh),
        ],
        "order": [
            message_of(check_replicas, Rows(bool(rank)), world),
            message_of(check_replicas_over_mesh, Rows(bool(rank)), mesh),
        ],
    }
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, rank)
    nn.init.constant_(model.bias, rank)
    model.weight = distributed_parameter(model.weight, mesh, 0)
    copy_from_first(model, mesh)
    results["cut"], results["whole"] = model.weight.to_local().tolist(), model.bias.tolist()
    copy_from_first(model, init_device_mesh("cpu", (1, 2)))
    results["cut again"] = model.weight.to_local().tolist()
    return results


def four_processes() -> list[Any]:
    from ftk.model_parallel.tensor_parallel.sharding import distributed_parameter

    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, rank)
    nn.init.constant_(model.bias, rank)
    model.weight = distributed_parameter(model.weight, mesh["tensor"], 0)
    copy_from_first(model, mesh)
    flat = init_device_mesh("cpu", (4,))
    return [model.weight.to_local().tolist(), model.bias.tolist(), message_of(copy_from_first, model, flat)]


@pytest.fixture(scope="module")
def two():
    return run_ranks(two_processes, 2)


def test_processes_that_hold_rows_in_another_order_are_refused(two):
    for result in two:
        assert result["alike"] == ["", ""]
        for message in result["order"]:
            assert message.startswith("weight differs from process to process")


def test_what_is_cut_already_stays_cut_and_what_is_whole_is_made_equal(two):
    for rank, result in enumerate(two):
        assert result["cut"] == result["cut again"] == [[rank, rank]]
        assert result["whole"] == [0, 0]


def test_what_is_cut_already_is_made_equal_over_the_other_processes():
    for rank, (cut, whole, message) in enumerate(run_ranks(four_processes, 4)):
        assert cut == [[rank % 2] * 2]
        assert whole == [0, 0]
        assert message.startswith(f"weight lies on the processes {[rank // 2 * 2, rank // 2 * 2 + 1]} already")
