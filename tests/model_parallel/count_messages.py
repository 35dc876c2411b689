"""Counts what is actually sent: every collective that passes PyTorch's dispatcher, with its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftk.planner.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND

OTHER = "other"

# Operator -> (collective, which argument is the whole tensor). Functional operators take it or return it.
_OPERATORS: dict[str, tuple[str, str]] = {
    "_c10d_functional::all_reduce": (ALL_REDUCE, "input"),
    "_c10d_functional::all_reduce_": (ALL_REDUCE, "input"),
    "_c10d_functional::all_gather_into_tensor": (ALL_GATHER, "output"),
    "_c10d_functional::all_gather_into_tensor_out": (ALL_GATHER, "output"),
    "_c10d_functional::reduce_scatter_tensor": (REDUCE_SCATTER, "input"),
    "c10d::allreduce_": (ALL_REDUCE, "input"),
    "c10d::_allgather_base_": (ALL_GATHER, "input"),
    "c10d::_reduce_scatter_base_": (REDUCE_SCATTER, "second"),
    "c10d::send": (SEND, "input"),
}

_SILENT = ("wait_tensor", "_wrap_tensor_autograd", "recv_", "barrier", "monitored_barrier_")


class Message(NamedTuple):
    """A kind of message: the collective, the processes of its group, bytes of the whole tensor."""

    collective: str
    group_size: int
    message_bytes: int


class CountMessages(TorchDispatchMode):
    """Inside, every collective is noted; nothing else changes.

    `CommDebugMode` of PyTorch counts the same calls without their sizes; a test holds the two together. Receives are
    the other side of sends and are not noted.

    Attributes:
        counts: how many messages of each kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Message] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition(".")[0]
            if name in _OPERATORS:
                collective, place = _OPERATORS[name]
                tensor = _first_tensor({"input": args[0], "second": args[1], "output": result}[place])
                self.counts[Message(collective, _group_size(args), tensor.nbytes)] += 1
            elif name.rpartition("::")[2] not in _SILENT:
                self.counts[Message(f"{OTHER} ({name})", _group_size(args), 0)] += 1
        return result

    def total_counts(self) -> dict[str, int]:
        """By collective."""
        return _by_collective(self.counts)

    def total_bytes(self) -> dict[str, int]:
        """By collective."""
        return _by_collective({message: count * message.message_bytes for message, count in self.counts.items()})


def _by_collective(values: Mapping[Message, int]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for message, value in values.items():
        totals[message.collective] += value
    return dict(totals)


def _first_tensor(value: Any) -> torch.Tensor:
    while isinstance(value, list | tuple):
        value = value[0]
    return value


def _group_size(arguments: Any) -> int:
    """Of a functional operator by the group's name, of another by the group itself."""
    from torch.distributed import distributed_c10d as c10d

    for argument in arguments:
        if isinstance(argument, str) and argument in c10d._world.pg_names.values():
            return c10d._resolve_process_group(argument).size()  # type: ignore
        if isinstance(argument, torch.ScriptObject):
            return c10d.ProcessGroup.unbox(argument).size()
    return 0
