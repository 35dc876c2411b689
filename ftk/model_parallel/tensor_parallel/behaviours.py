"""The forward passes of styled modules; each class is mixed into the class of the module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ftk.model_parallel.tensor_parallel.functions import copy_to_region, gather_from_region, scatter_to_region
from ftk.model_parallel.tensor_parallel.region import TensorRegion


class Styled(nn.Module):
    """Base of all; the forward pass is that of the module's own class."""

    tensor_style: Any  # of `styles`, whose options the forward pass reads
    tensor_region: TensorRegion

    def seen(self, name: str, parameter: DTensor) -> Tensor:
        """The part of a parameter that the module's own code reads."""
        return parameter.to_local()


class ReplicatedModule(Styled):
    """See `styles.Replicated`."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        with self.tensor_region.random.common(_device(inputs)) if _is_random(self) else nullcontext():
            return super().forward(*inputs, **options)


class SequenceModule(Styled):
    """See `styles.Sequence`."""

    def forward(self, values: Tensor, *inputs: Any, **options: Any) -> Any:
        region, style = self.tensor_region, self.tensor_style
        if style.scatter_input:
            values = region.share(values)
        with self._stream(values.device):
            output = super().forward(values, *inputs, **options)
        return region.gather(output) if style.gather_output else output

    def _stream(self, device: torch.device) -> AbstractContextManager[None]:
        if not _is_random(self):
            return nullcontext()
        random = self.tensor_region.random
        return random.own(device) if self.tensor_region.shares_sequence else random.common(device)


class ShardedModule(Styled):
    """See `styles.Sharded`. Parameters of its own are whole on each process, which has a part of their gradient."""

    def seen(self, name: str, parameter: DTensor) -> Tensor:
        return copy_to_region(parameter.to_local(), self.tensor_region.group)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if not (self.training and self.tensor_style.own_random):
            return super().forward(*inputs, **options)
        with self.tensor_region.random.own(_device(inputs)):
            return super().forward(*inputs, **options)


class ColumnModule(Styled):
    """See `styles.Column`."""

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(self.tensor_region.enter(hidden))
        return gather_from_region(output, self.tensor_region.group, -1) if self.tensor_style.gather_output else output


class RowModule(Styled):
    """See `styles.Row`."""

    def seen(self, name: str, parameter: DTensor) -> Tensor:
        local = parameter.to_local()
        if name == "bias":
            return _FirstRankOnly.apply(local, self.tensor_region.rank == 0)
        return local

    def forward(self, hidden: Tensor) -> Tensor:
        region = self.tensor_region
        if self.tensor_style.scatter_input:
            hidden = scatter_to_region(region.gather(hidden), region.group, -1)
        return region.leave(super().forward(hidden))


class _WholeOutside(Styled):
    """To the outside parameters are DTensors, so that a loss can see how they are cut."""

    _weight_is_local: bool = False

    def seen(self, name: str, parameter: DTensor) -> Tensor:
        return parameter.to_local() if self._weight_is_local else parameter

    @contextmanager
    def _local_weight(self) -> Iterator[None]:
        self._weight_is_local = True
        try:
            yield
        finally:
            self._weight_is_local = False


class VocabEmbeddingModule(_WholeOutside):
    """See `styles.VocabEmbedding`."""

    padding_idx: int | None

    def forward(self, tokens: Tensor) -> Tensor:
        region = self.tensor_region
        parameter = self._parameters["weight"]
        assert isinstance(parameter, DTensor), "a styled embedding has a distributed weight"
        rows = embedded_rows(tokens, parameter, region.rank, self.padding_idx)
        if self.tensor_style.whole_sequence or not region.shares_sequence:
            return region.sum(rows)
        region.length = tokens.size(-1)
        return region.leave(rows)


class TiedVocabEmbeddingModule(VocabEmbeddingModule):
    """One that is the output layer too."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H], the same on every process -> [..., V], the same too"""
        group = self.tensor_region.group
        with self._local_weight():
            logits = super().logits(copy_to_region(hidden, group))  # type: ignore[misc]
        return gather_from_region(logits, group, -1, self._parameters["weight"].size(0))  # type: ignore[union-attr]


class VocabOutputModule(_WholeOutside):
    """See `styles.VocabOutput`."""

    def forward(self, hidden: Tensor) -> Tensor:
        group = self.tensor_region.group
        with self._local_weight():
            logits = super().forward(copy_to_region(hidden, group))
        return gather_from_region(logits, group, -1, self._parameters["weight"].size(0))  # type: ignore[union-attr]


def embedded_rows(tokens: Tensor, weight: DTensor, rank: int, padding_idx: int | None = None) -> Tensor:
    """tokens [...] -> [..., H]: this process's rows, zeros where another process has the row."""
    local = weight.to_local()  # [n, H]
    start = first_row(weight, rank)
    places = tokens - start
    elsewhere = (places < 0) | (places >= local.size(0))
    padding = None if padding_idx is None else padding_idx - start
    if padding is not None and not 0 <= padding < local.size(0):
        padding = None
    rows = F.embedding(places.masked_fill(elsewhere, 0), local, padding_idx=padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def first_row(weight: DTensor, rank: int) -> int:
    """The first row of a matrix cut by rows that process `rank` of the mesh has."""
    return rank * -(-weight.size(0) // weight.device_mesh.size())


class _FirstRankOnly(torch.autograd.Function):
    """A value that only the first process adds to a sum over all: zeros on the others.

    The gradient is that of the sum, which is the same on every process.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, here: bool) -> Tensor:
        return values.view_as(values) if here else torch.zeros_like(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


def drops(module: nn.Module) -> bool:
    """Whether this is dropout that does something in training."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0


def _is_random(module: nn.Module) -> bool:
    return module.training and drops(module)


def _device(inputs: tuple[Any, ...]) -> torch.device:
    return next((value.device for value in inputs if isinstance(value, Tensor)), torch.device("cpu"))
