"""Megatron's layers, for models that are written with them: a linear layer or an embedding that processes share.

They are torch's own layers with a style put on (`styles`): built with the same seed they have the initial values of
`nn.Linear` and `nn.Embedding`, their parameters are DTensors, and state dicts have the names and shapes of one process.
The mesh is one-dimensional, over the processes that share the layers, such as `mesh["tensor"]`. What lies between the
layers on parts of a sequence is made known by `works_on_sequence`.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ftk.errors import UserError
from ftk.model_parallel.tensor_parallel import behaviours, styles
from ftk.model_parallel.tensor_parallel.behaviours import adopt, local_parameter
from ftk.model_parallel.tensor_parallel.region import TensorRegion


class ColumnParallelLinear(behaviours.Column, nn.Linear):
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

    weight = local_parameter("weight")  # type: ignore[assignment]
    bias = local_parameter("bias")  # type: ignore[assignment]

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
        _share(self, styles.Column(gather_output=gather_output), mesh, sequence_parallel)


class RowParallelLinear(behaviours.Row, nn.Linear):
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

    weight = local_parameter("weight")  # type: ignore[assignment]
    bias = local_parameter("bias")  # type: ignore[assignment]

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
        _share(self, styles.Row(scatter_input=not input_is_parallel), mesh, sequence_parallel)


class VocabParallelEmbedding(behaviours.VocabEmbedding, nn.Embedding):
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

    weight = local_parameter("weight")  # type: ignore[assignment]

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
        _share(self, styles.VocabEmbedding(), mesh, sequence_parallel)


def works_on_sequence(module: nn.Module, mesh: DeviceMesh) -> None:
    """Tell that a module (a norm, a dropout) works on a part of the sequence, in place.

    Its random numbers differ from process to process, and its gradients are summed over them once an update by
    `ftk.model_parallel.tensor_parallel.apply.sum_sequence_gradients(model)`.
    """
    adopt(module, styles.Sequence(), TensorRegion(mesh, sequence_parallel=True))


def _share(module: nn.Module, style: styles.Style, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    mistakes = list(style.check(module, mesh.size()))
    if mistakes:
        raise UserError(f"{type(module).__name__} {'; '.join(mistakes)}")
    adopt(module, style, TensorRegion(mesh, sequence_parallel))
