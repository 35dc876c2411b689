"""A small GLM on processes that share its layers, batches for it, and its gradients made whole again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ftk.batch import Batch
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.model_parallel.tensor_parallel.apply import apply_plan
from ftk.model_parallel.world import Sizes, make_world
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from ftk.modules.few_rows_layer import prepare
from tests import dense
from tests.model_parallel.small_steps import VOCAB, small_config

HIDDEN, LAYERS, POSITIONS = 64, 2, 40
SEQUENCE = False, True


def shape(dropout: float = 0.0) -> GLMConfig:
    dropouts = dict.fromkeys(("embedding_dropout", "attention_dropout", "dropout"), dropout)
    return small_config(num_layers=LAYERS, hidden_size=HIDDEN, max_positions=POSITIONS, **dropouts)


def parallel(sequence: bool, dropout: float = 0.0, prepared: bool = False) -> GLM:
    model = GLM(shape(dropout), seed=1)
    if prepared:  # for generation
        prepare(model)
    mesh = make_world(Sizes(tensor=dist.get_world_size()), "cpu").mesh
    assert mesh is not None
    apply_plan(model, model.tensor_parallel_plan, mesh["tensor"], sequence)
    return model


def batch_of(seed: int, length: int = 31) -> Batch:
    """Three samples with blanks, of a length that no number of processes divides; two of them hold two documents."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(length)
    return dense.batch_of(
        {
            "tokens": torch.randint(VOCAB, (3, length), generator=generator),
            "targets": torch.randint(VOCAB, (3, length), generator=generator),
            "loss_mask": torch.rand(3, length, generator=generator) < 0.4,
            "position_ids": torch.stack((place, place // 2)).expand(3, 2, length),
            "context_length": torch.tensor([3, 0, 20]),
            "document_ids": torch.stack((place // 20, place // 9, place * 0)),
        }
    )


def loss_of(model: Any, batch: Batch, **options: Any) -> Tensor:
    output = CrossEntropy(CrossEntropyConfig(**options))(model, batch)
    return output.loss / output.num_targets


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if isinstance(parameter, DTensor):
            assert parameter.grad.placements == parameter.placements, name
    return {name: whole(parameter.grad).clone() for name, parameter in model.named_parameters()}
