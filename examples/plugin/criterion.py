"""A criterion: the focal loss, which turns away from what is already well predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.nn import functional as F

from ftk.criterions.base import LossOutput
from ftk.registry import register_criterion


@dataclass(kw_only=True)
class FocalLossConfig:
    focus: float = field(default=1.0, metadata={"help": "exponent of (1 - p); 0 is the cross entropy"})

    def validate(self) -> Iterator[str]:
        if self.focus < 0:
            yield f"focus is {self.focus}; it must be 0 or more"


@register_criterion("focal_loss", config=FocalLossConfig)
class FocalLoss:
    """-(1 - p)^focus log p of the target tokens, summed (Lin et al. 2017, eq. 4)."""

    def __init__(self, config: FocalLossConfig) -> None:
        self.focus = config.focus

    def __call__(self, model: Any, batch: dict[str, Any]) -> LossOutput:
        logits = model(batch["tokens"])  # [B, T, V]
        nll = F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), reduction="none")  # [B * T]
        nll = nll * batch["loss_mask"].flatten()
        num_targets = batch["loss_mask"].sum()
        loss = ((1.0 - (-nll).exp()) ** self.focus * nll).sum()
        return LossOutput(loss, num_targets, {"nll_loss": (nll.detach().sum(), num_targets)})
