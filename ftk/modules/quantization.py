"""Which layers of a model are quantised and how, and replacing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ftk.errors import UserError
from ftk.modules.adapters.adapt import in_blocks, is_adapted
from ftk.modules.embeddings import TiedEmbedding
from ftk.modules.quantized_linear import GROUP_SIZES, Int4Linear, Int8Linear, Int8TiedEmbedding


@dataclass(kw_only=True)
class Quantization:
    """How the weights of a model are rounded; a quantised checkpoint keeps it under `quantization` in its config."""

    weights: str = field(metadata={"help": "of the linear layers of each block", "choices": ("int8", "int4")})
    group_size: int | None = field(default=None, metadata={"help": "inputs that share a scale; int4 only"})
    embedding: bool = field(default=True, metadata={"help": "the tied token embedding and output layer in int8, too"})

    def validate(self) -> Iterator[str]:
        if self.weights == "int4" and self.group_size not in GROUP_SIZES:
            yield f"group_size is {self.group_size}; it must be one of {', '.join(map(str, GROUP_SIZES))}"
        if self.weights == "int8" and self.group_size is not None:
            yield f"group_size is {self.group_size}; int8 has a scale for each output"


def quantize_model(model: nn.Module, how: Quantization) -> None:
    """Replace layers of a trained model by quantised ones of their weights, in place.

    Replaced are the linear layers in lists of layers and, if asked for, the tied embedding; norms, biases and positions
    stay.

    Raises:
        UserError: the model has no such layers, or has an adapter; the group size does not divide their inputs.
    """

    def linear(layer: nn.Linear) -> nn.Module:
        return Int8Linear.of(layer) if how.group_size is None else Int4Linear.of(layer, how.group_size)

    _replace(model, how, linear, Int8TiedEmbedding.of)


def prepare_quantized(model: nn.Module, how: Quantization) -> None:
    """Replace the same layers by quantised ones of their shapes, to be filled from a quantised checkpoint."""

    def linear(layer: nn.Linear) -> nn.Module:
        shape = (layer.in_features, layer.out_features, layer.bias is not None)
        dtype = layer.weight.dtype
        return (
            Int8Linear(*shape, dtype=dtype)
            if how.group_size is None
            else Int4Linear(*shape, group_size=how.group_size, dtype=dtype)
        )

    def embedding(layer: TiedEmbedding) -> nn.Module:
        return Int8TiedEmbedding(layer.num_embeddings, layer.embedding_dim, layer.weight.dtype)

    _replace(model, how, linear, embedding)


@torch.no_grad()
def _replace(
    model: nn.Module,
    how: Quantization,
    linear: Callable[[nn.Linear], nn.Module],
    embedding: Callable[[TiedEmbedding], nn.Module],
) -> None:
    if is_adapted(model):
        raise UserError("a model with an adapter cannot be quantised, as its adapter would be, too; merge that first")
    found = in_blocks(model, nn.Linear)
    if not found:
        raise UserError(f"{type(model).__name__} has no linear layers in an nn.ModuleList; it cannot be quantised")
    for name, layer in found.items():
        model.set_submodule(name, linear(layer))
    for name, layer in list(model.named_modules()) if how.embedding else []:
        if isinstance(layer, TiedEmbedding):
            model.set_submodule(name, embedding(layer))
