"""The forward pass of a step as one module: what DDP wraps, and what is the root of FSDP2; its precision, its sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class StepModule(nn.Module):
    """Model, output layer and loss in one forward pass.

    Both wrappers work around the forward pass of the module that they are given: FSDP2 holds the root's parameters,
    the tied output weight among them, whole only inside of it, and DDP prepares its reduction there. A criterion that
    reads the output layer has to lie within. Parameters keep the names that they have in `model`: take them from there.

    Args:
        criterion: computes the loss (`ftk.criterions.base.Criterion`).
    """

    def __init__(self, model: nn.Module, criterion: Any) -> None:
        super().__init__()
        self.model = model
        self._criterion = criterion

    def forward(self, batch: Any) -> Any:
        """The `LossOutput` of a `Batch` on the model's device; its loss is a sum, 0-d."""
        return self._criterion(self.model, batch)


LOW_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of a forward pass: bf16 or fp16 matrix products over fp32 weights, or nothing for fp32."""
    low = LOW_PRECISIONS.get(precision)
    return torch.autocast(device.type, dtype=low or torch.bfloat16, enabled=low is not None)


def add_sums(totals: dict[str, Any], sums: Mapping[str, Any]) -> None:
    """Add named (sum, count) pairs to those of before, numbers or tensors."""
    for name, (total, count) in sums.items():
        old = totals.get(name)
        totals[name] = (total, count) if old is None else (old[0] + total, old[1] + count)
