"""A small GLM of five layers, which pipelines cut into stages, and its batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ftk.batch import Batch
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from tests.dense import batch_of
from tests.model_parallel.small_steps import VOCAB, small_glm

UPDATE_FREQ = 4

five_layers = partial(small_glm, num_layers=5)


def varied_batches(update: int) -> list[Batch]:
    """Micro-batches of different rows and lengths with all that a collater can put into one; 1 to 3 rows, 17 to 24
    tokens."""
    generator = torch.Generator().manual_seed(1000 + update)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    made = []
    for _ in range(UPDATE_FREQ):
        rows, length = 1 + int(numbers(3)), 17 + int(numbers(8))
        places = torch.arange(length)
        context = 5 + numbers(10, rows)
        made.append(
            batch_of(
                {
                    "tokens": numbers(VOCAB, rows, length),
                    "targets": numbers(VOCAB, rows, length),
                    "loss_mask": places >= context[:, None],
                    "position_ids": torch.stack((places, places // 3)).expand(rows, -1, -1).contiguous(),
                    "context_length": context,
                    "objective": numbers(3, rows),
                    "document_ids": (places >= 9).long().expand(rows, -1).contiguous(),
                }
            )
        )
        made[-1].sample_ids = numbers(10**6, rows).numpy()
    return made


def criterion(**options: Any) -> CrossEntropy:
    return CrossEntropy(CrossEntropyConfig(**options))
