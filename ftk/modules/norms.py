"""Root-mean-square norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """w * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich 2019).

    In lower precision x is normalised in float32 and rounded before the product with w, as the published models were
    trained; torch's own norm rounds after it, which differs in a quarter of the elements in bfloat16.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        if hidden.dtype == torch.float32:
            return super().forward(hidden)
        assert self.eps is not None, "every family gives one"
        normal = F.rms_norm(hidden.float(), self.normalized_shape, None, self.eps)
        return self.weight * normal.to(hidden.dtype)
