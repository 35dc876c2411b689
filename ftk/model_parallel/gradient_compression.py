"""What copies of a model send each other of their gradients: sums, whole or compressed."""

# No `from __future__ import annotations`: DDP checks the hooks' annotations, and takes no strings.
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def sum_gradients(
    model: DistributedDataParallel, compression: str = "none", rank: int = 1, after_updates: int = 1000
) -> None:
    """Let DDP sum gradients instead of averaging them, compressed if so asked.

    Args:
        model: fresh; it takes one hook in its life.
        compression: "none", "bf16", or "powersgd" (Vogels et al. 2019, https://arxiv.org/abs/1905.13727).
        rank: of PowerSGD's approximations.
        after_updates: PowerSGD begins after so many updates. What it holds back for later updates is in no checkpoint:
            a run that continues begins it anew.
    """
    group = model.process_group
    if compression == "powersgd":
        state = PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=after_updates)
        model.register_comm_hook(state, _powersgd_sum)
    else:
        model.register_comm_hook(group, _bf16_sum if compression == "bf16" else _sum)


def _sum(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _bf16_sum(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's own hook is the same but for the average, and DDP refuses it on gloo, which can sum bf16."""
    work = dist.all_reduce(bucket.buffer().bfloat16(), group=group, async_op=True)
    return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))


def _powersgd_sum(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's hook averages; its memory of errors is in terms of averages too, so that the sum is made after it.

    It sends again when a first answer is there. On gloo that happens in threads of its own, where messages of two
    buckets would overtake each other, on each process otherwise, and all would wait for ever: there, one bucket at a
    time.
    """
    size = state.process_group.size()
    averaged = powerSGD_hook(state, bucket)
    if bucket.buffer().device.type == "cpu":
        averaged.wait()
    return averaged.then(lambda future: future.value().mul_(size))
