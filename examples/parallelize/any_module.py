"""Any nn.Module, shared out over processes by FSDP2 with activation checkpointing: the one line is ftk.parallelize.

torchrun --nproc-per-node 2 examples/parallelize/any_module.py
"""

import torch
import torch.distributed as dist
from torch import nn

import ftk


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(64, 1)

    def forward(self, x):  # [B, 64] -> [B, 1]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = torch.randn(512, 64)  # [samples, 64], the same on every process
mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
model = ftk.parallelize(Regression(), mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(3):
    for batch in data.split(64):
        own = batch[rank::size]  # this process's part of the batch
        # Gradients are summed over processes: the loss is divided by the size of the whole batch.
        loss = (model(own) - own.sum(-1, keepdim=True)).square().sum() / len(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
dist.barrier()
dist.destroy_process_group()
