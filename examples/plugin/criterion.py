"""A criterion: the focal loss, which turns away from what is already well predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ftk.batch import Batch
from ftk.config.options import option
from ftk.criterions.base import Criterion, LossOutput
from ftk.registry import register_criterion


@dataclass(kw_only=True)
class FocalLossConfig:
    focus: float = option(1.0, "exponent of (1 - p); 0 is the cross entropy", "[0, inf)")


@register_criterion("focal_loss", config=FocalLossConfig)
class FocalLoss(Criterion):
    """-(1 - p)^focus log p of the target tokens, summed (Lin et al. 2017, eq. 4)."""

    def __init__(self, config: FocalLossConfig) -> None:
        self.focus = config.focus

    def loss(self, head: Any, hidden: Tensor, batch: Batch) -> LossOutput:
        nll = F.cross_entropy(head(hidden).float(), batch.targets, reduction="none")  # [N]
        num_targets = batch.targets.new_full((), len(nll))
        loss = ((1.0 - (-nll).exp()) ** self.focus * nll).sum()
        return LossOutput(loss, num_targets, {"nll_loss": (nll.detach().sum(), num_targets)})
