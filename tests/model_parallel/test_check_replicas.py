"""Processes that hold other values, or the same at other places, are refused by the name of the first parameter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ftk.errors import UserError
from ftk.model_parallel.check_replicas import check_replicas, copy_from_first
from ftk.model_parallel.world import Sizes, make_world
from tests.distributed import run_ranks

VALUES = {
    "float32": torch.arange(12.0).view(3, 4),
    "bfloat16": torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False, False]),
    "int64": torch.tensor([3, 1, 2]),
    "complex": torch.tensor([1 + 2j, 2 + 1j, 0j]),
    "no dimensions": torch.tensor(2.0),
    "empty": torch.empty(0, 3),
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "order": lambda values: values.flip(0),
    "shape": lambda values: values.reshape(-1, 1),
    "type": lambda values: values.to(torch.float64),
    "strides": lambda values: values.T.contiguous().T,
    "none": lambda values: values.clone(),
}
ALIKE = {("float32", "strides")} | {(kind, "none") for kind in VALUES} | {(kind, "order") for kind in ("empty",)}
CASES = [(kind, change) for kind in VALUES for change in CHANGES if not (kind == "no dimensions" and change == "order")]
CASES = [(kind, change) for kind, change in CASES if change != "strides" or kind == "float32"]


def messages() -> dict[str, str]:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    world, found = make_world(Sizes(replicate=2), "cpu"), {}
    for kind, change in CASES:
        model = nn.Module()
        model.register_buffer("scratch", torch.full((2,), float(rank)), persistent=False)
        model.register_buffer("same", torch.ones(2))
        model.register_buffer("values", CHANGES[change](VALUES[kind]) if rank else VALUES[kind])
        try:
            check_replicas(model, world)
            found[f"{kind}, {change}"] = ""
        except UserError as error:
            found[f"{kind}, {change}"] = str(error)
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, rank + 1)
    copy_from_first(model, mesh)
    found["copied"] = str(model.weight.tolist())
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, str]]:
    return run_ranks(messages, 2)


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_other_values_shapes_and_types_are_refused(two: list[dict[str, str]], kind: str, change: str) -> None:
    start = "" if (kind, change) in ALIKE else "values differs between processes"
    assert all(found[f"{kind}, {change}"].startswith(start) for found in two)
    assert all(bool(found[f"{kind}, {change}"]) == bool(start) for found in two)


def test_the_first_process_gives_its_values_to_all(two: list[dict[str, str]]) -> None:
    assert all(found["copied"] == "[[1.0, 1.0], [1.0, 1.0]]" for found in two)
