"""Gradients of an update are summed over processes once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ftk.model_parallel.gradients import gradient_sync


@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("last_only", [False, True])
def test_ddp_sums_only_where_it_is_enabled(one_process_group, last_only):
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    sums = []

    def count(_, bucket):
        sums.append(bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, count)
    for place in range(3):
        with gradient_sync(model, enabled=not last_only or place == 2):
            model(torch.ones(1, 3)).sum().backward()
    assert len(sums) == (1 if last_only else 3)
    assert torch.equal(model.module.weight.grad, torch.full((2, 3), 3.0))


def test_fsdp_is_told(one_process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(3, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for enabled in (False, True):
        with gradient_sync(model, enabled):
            model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((2, 3), 2.0))


def test_a_plain_module_is_left_alone():
    model = nn.Linear(3, 2)
    with gradient_sync(model, enabled=False):
        model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
