"""Megatron's layers, for models that are written with them: a linear layer or an embedding that processes share.

They are torch's own layers with a style put on (`styles`): built with the same seed they have the initial values of
`nn.Linear` and `nn.Embedding`. The mesh is one-dimensional, over the processes that share the layers, such as
`mesh["tensor"]`.

Parameters are DTensors on that mesh, of the names and shapes of one process: `layer.weight.requires_grad_(False)` works
as on `nn.Linear`; `layer.weight.to_local()` and `layer.weight.grad.to_local()` are this process's part. Other initial
values are set by `layer.reset_parameters(weight=...)`, which draws the whole: `torch.nn.init` on the weight itself may
draw the same numbers for every process's part. A state dict of `nn.Linear` or `nn.Embedding` can be loaded, each
process taking its part; `ftk.model_parallel.tensor_parallel.apply.whole_state_dict(model)` gives one.

With `sequence_parallel=True` what lies between the layers are parts of a sequence, always, with or without gradients:
P processes have n = T / P places each. A length that P does not divide is filled up: `VocabParallelEmbedding` fills up
with zeros, and a `ColumnParallelLinear` gives n P places, of which those from T on are not to be looked at: attention
masks them, as a causal mask does, and `functions.gather_from_region(hidden, group, 1, T)` leaves them out at the end.
Modules between the layers are made known by `works_on_sequence`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ftk.errors import UserError
from ftk.model_parallel.materialize import copy_whole_into
from ftk.model_parallel.tensor_parallel import behaviours, styles
from ftk.model_parallel.tensor_parallel.behaviours import adopt
from ftk.model_parallel.tensor_parallel.region import TensorRegion

Initializer = Callable[[Tensor], Any]
"""Fills a tensor in place, such as `torch.nn.init.zeros_`."""


class _Shared(nn.Module, ABC):
    """What the layers have in common: values are set and loaded as if they lay on one process."""

    def _share(self, style: styles.Style, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        """Make it one of the processes of `mesh`."""
        region = TensorRegion(mesh, sequence_parallel, without_gradients=True)
        mistakes = list(style.check(self, region.size))
        if mistakes:
            raise UserError(f"{type(self).__name__} {'; '.join(mistakes)}")
        adopt(self, style, region)

    @torch.no_grad()
    def reset_parameters(self, weight: Initializer | None = None, bias: Initializer | None = None) -> None:
        """Set initial values: each process draws the whole, one parameter at a time, and keeps its part.

        With one seed on all processes the parameters together are those of one process; nothing is sent.

            layer.reset_parameters(weight=lambda whole: nn.init.normal_(whole, std=0.02), bias=nn.init.zeros_)

        Args:
            weight: fills the whole weight in place; None: it stays.
            bias: the same of the bias. Neither given: both are drawn as torch's own layer draws them.

        Raises:
            UserError: there is no bias to fill.
        """
        if not isinstance(self._parameters["weight"], DTensor):  # torch's layer is being built
            super().reset_parameters()  # type: ignore[misc]
        elif weight is None and bias is None:
            for name, value in self._plain()._parameters.items():
                if value is not None:
                    copy_whole_into(self._parameters[name], value)  # type: ignore[arg-type]
        else:
            for name, fill in (("weight", weight), ("bias", bias)):
                if fill is None:
                    continue
                parameter = self._parameters.get(name)
                if parameter is None:
                    raise UserError(f"{type(self).__name__} has no {name} to set")
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                fill(whole)
                copy_whole_into(parameter, whole)

    @abstractmethod
    def _plain(self) -> nn.Module:
        """A layer of torch as this one is on one process, with initial values."""


class _SharedLinear(_Shared, nn.Linear):
    def _plain(self) -> nn.Module:
        weight, bias = self.weight, self.bias is not None
        return nn.Linear(self.in_features, self.out_features, bias, device=weight.device, dtype=weight.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._own("weight"), self._own("bias"))  # type: ignore[arg-type]

    def _own(self, name: str) -> Tensor | None:
        """This process's part of a parameter, as the behaviour wants it to be seen."""
        parameter = self._parameters[name]
        return self.seen(name, parameter) if isinstance(parameter, DTensor) else parameter  # type: ignore[operator]


class _SharedEmbedding(_Shared, nn.Embedding):
    def _plain(self) -> nn.Module:
        sizes, weight = (self.num_embeddings, self.embedding_dim, self.padding_idx), self.weight
        return nn.Embedding(*sizes, device=weight.device, dtype=weight.dtype)


class ColumnParallelLinear(behaviours.Column, _SharedLinear):
    """Y = X A + b with A cut along its columns: each process makes a part of the outputs.

    Args:
        in_features: I.
        out_features: O, a multiple of the processes.
        mesh: the processes.
        bias: whether there is one.
        gather_output: give all outputs on every process.
        sequence_parallel: the input is a part of the sequence, [B, n, I], and is gathered first.

    Raises:
        UserError: the processes do not divide O.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: DeviceMesh,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias)
        self._share(styles.Column(gather_output=gather_output), mesh, sequence_parallel)


class RowParallelLinear(behaviours.Row, _SharedLinear):
    """Y = X A + b with A cut along its rows: each process has a part of the inputs, and the products are summed.

    Args:
        in_features: I, a multiple of the processes.
        out_features: O.
        mesh: the processes.
        bias: whether there is one; it is whole on every process and added once.
        input_is_parallel: the input is what a `ColumnParallelLinear` gave; else it is whole, and cut first.
        sequence_parallel: each process gets a part of the sequence of the sum, [B, n, O].

    Raises:
        UserError: the processes do not divide I.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: DeviceMesh,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias)
        self._share(styles.Row(scatter_input=not input_is_parallel), mesh, sequence_parallel)


class VocabParallelEmbedding(behaviours.VocabEmbedding, _SharedEmbedding):
    """An embedding of whose rows each process has a part; any number of rows that gives each process one.

    `self.weight` is the DTensor [V, H], for an output layer that is tied to it
    (`ftk.model_parallel.tensor_parallel.cross_entropy.sharded_output`).

    Args:
        num_embeddings: V.
        embedding_dim: H.
        mesh: the processes.
        padding_idx: a row whose gradient is 0.
        sequence_parallel: each process gets a part of the sequence, [B, n, H].

    Raises:
        UserError: there are fewer rows than processes can share.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mesh: DeviceMesh,
        *,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        nn.Embedding.__init__(self, num_embeddings, embedding_dim, padding_idx=padding_idx)
        self._share(styles.VocabEmbedding(), mesh, sequence_parallel)


def works_on_sequence(module: nn.Module, mesh: DeviceMesh) -> None:
    """Tell that a module (a norm, a dropout) works on a part of the sequence, in place.

    Its random numbers differ from process to process. Its gradients are partial after the backward pass, and nothing
    sums them by itself: once an update, after the last backward pass and before their norm is taken, call

        ftk.model_parallel.tensor_parallel.apply.sum_sequence_gradients(model)

    on every process, of the model that holds all such modules. `ftk.model_parallel.gradients.finish_gradients(model)`,
    which ftk's trainer calls, does it for a model to which it was added once:

        add_finisher(model, functools.partial(sum_sequence_gradients, model))

    One of the two, not both: a second call would sum what is summed already.
    """
    region = TensorRegion(mesh, sequence_parallel=True, without_gradients=True)
    adopt(module, styles.Sequence(), region)
