"""The tensor parallel processes, as the layers of a model see them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ftk.errors import UserError
from ftk.model_parallel.tensor_parallel.functions import (
    copy_to_region,
    gather_from_region,
    gather_from_sequence_region,
    part_size,
    reduce_from_region,
    reduce_scatter_to_sequence_region,
    scatter_to_region,
)
from ftk.model_parallel.tensor_parallel.random import RandomStreams

SEQUENCE_DIM = 1  # of hidden states, [B, T, H]


class TensorRegion:
    """The processes that share each layer, and how values come to shared layers and back.

    Between shared layers values are whole on every process, or each process has a part of the sequence (sequence
    parallel). That saves what is kept for the backward pass, so a planned model, which cuts and gathers by itself,
    shares sequences only where gradients are enabled: in validation and generation values are whole.

    Args:
        mesh: one-dimensional, over the processes.
        sequence_parallel: whether sequences are shared between shared layers.
        two_stacks: whether sequences of two lengths are shared at a time; then the processes must divide both.

    Raises:
        UserError: the mesh has more dimensions.

    Attributes:
        length: of the sequence that is shared at present; None: the parts' sizes add up to it.
    """

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool = False, two_stacks: bool = False) -> None:
        if mesh.ndim != 1:
            raise UserError(
                f"a mesh of {tuple(mesh.shape)} with the names {mesh.mesh_dim_names}; layers are shared over one "
                f'dimension: give that alone, such as mesh["tensor"]'
            )
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.sequence_parallel = sequence_parallel
        self.two_stacks = two_stacks
        self.length: int | None = None
        self.random = RandomStreams(self.rank)

    def __deepcopy__(self, memo: Any) -> TensorRegion:
        return self  # process groups cannot be copied; a copied model uses the same processes

    @property
    def cuts_sequence(self) -> bool:
        """Whether values between shared layers are parts of the sequence now."""
        return self.sequence_parallel and torch.is_grad_enabled()

    def enter(self, hidden: Tensor) -> Tensor:
        """What a column-parallel layer reads: hidden [B, T or n, H] -> [B, T, H]"""
        device = hidden.device.type
        # torch 2.11 cannot compile is_autocast_available, which is false for meta alone of the devices that we have.
        casts = device != "meta" and torch.is_autocast_enabled(device)
        if casts and hidden.is_floating_point() and hidden.dtype != torch.float64:
            hidden = hidden.to(torch.get_autocast_dtype(device))  # as the layer will: half the bytes to send
        if self.cuts_sequence:
            return gather_from_sequence_region(hidden, self.group, SEQUENCE_DIM, self._length_of(hidden))
        return copy_to_region(hidden, self.group)

    def leave(self, partial: Tensor) -> Tensor:
        """What a row-parallel layer gives: the sum of partial [B, T, H], or a part of its sequence [B, n, H]"""
        if self.cuts_sequence:
            return reduce_scatter_to_sequence_region(partial, self.group, SEQUENCE_DIM)
        return reduce_from_region(partial, self.group)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of what the processes have, of whole sequences: partial [B, T, ...] -> [B, T, ...]"""
        return reduce_from_region(partial, self.group)

    def note_length(self, length: int) -> None:
        """That of the sequence that is shared from here on.

        Raises:
            UserError: it is one of two, and the processes do not divide it.
        """
        if not self.two_stacks:
            self.length = length
        elif length % self.size:
            raise UserError(
                f"a sequence of {length} tokens, which {self.size} tensor parallel processes do not divide; with "
                f"`sequence_parallel` pad both sequences of an encoder-decoder (Batch.longer)"
            )

    def scatter(self, values: Tensor) -> Tensor:
        """Own part of the sequence, if it is shared: hidden [B, T, H] -> [B, n, H], ids [.., T] -> [.., n]"""
        if not self.cuts_sequence:
            return values
        dim = SEQUENCE_DIM if values.is_floating_point() else values.dim() - 1
        self.note_length(values.size(dim))
        return scatter_to_region(values, self.group, dim)

    def gather(self, hidden: Tensor) -> Tensor:
        """The whole sequence, if it is shared: hidden [B, n, H] -> [B, T, H]"""
        if not self.cuts_sequence:
            return hidden
        return gather_from_region(hidden, self.group, SEQUENCE_DIM, self._length_of(hidden))

    def _length_of(self, part: Tensor) -> int:
        size = part.size(SEQUENCE_DIM)
        if self.length is not None and part_size(self.length, self.size) == size:
            return self.length
        return size * self.size
