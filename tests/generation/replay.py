"""A stand-in for CUDA graphs on a CPU: records the operators of a step, and repeats them on the very same tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.generation.test_waits import Waits


class Recording:
    """Records steps as `ftk.modules.cuda_graphs.CudaGraphs` does.

    As with a graph, numbers and tensors of the host are what they were when the step was recorded, and recording a step
    changes nothing on the device and draws no random numbers. It refuses what cannot be recorded: calls in which the
    host waits for the device.
    """

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replays = 0

    def __call__(self, step):
        random, operators = torch.get_rng_state(), _Operators()
        try:
            with Waits() as waits, operators:
                returned = step()
        finally:
            torch.set_rng_state(random)
            with torch.no_grad():
                operators.undo()
        if waits.found:
            raise RuntimeError(f"the host waits for the device: {waits.found}")
        self.num_recorded += 1

        def replay():
            self.num_replays += 1
            with torch.no_grad():
                operators.repeat()
            return returned

        return replay


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []
        self.overwritten = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._will_write(argument, value)
        for argument in func._schema.arguments:
            self._will_write(argument, kwargs.get(argument.name))
        returned = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, returned))
        return returned

    def _will_write(self, argument, value):
        if isinstance(value, Tensor) and argument.alias_info is not None and argument.alias_info.is_write:
            self.overwritten.append((value, value.clone()))

    def undo(self):
        for tensor, before in reversed(self.overwritten):
            tensor.copy_(before)

    def repeat(self):
        for func, args, kwargs, returned in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(returned), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
