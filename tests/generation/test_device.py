"""How what the host makes comes to a device."""

from __future__ import annotations

import torch

from ftk.generation.engine.device import sent


class Recorded:
    """Stands for a tensor: what is done to it is written down."""

    def __init__(self):
        self.done = []

    def pin_memory(self):
        self.done.append("pin_memory")
        return self

    def to(self, device, non_blocking):
        self.done.append((device, non_blocking))
        return self


def test_to_a_gpu_it_goes_by_page_locked_memory():
    gpu = torch.device("cuda", 0)  # named, not used
    assert sent(Recorded(), gpu).done == ["pin_memory", (gpu, True)]


def test_on_the_cpu_it_is_the_tensor_itself():
    tensor = torch.arange(3)
    assert sent(tensor, torch.device("cpu")) is tensor
