"""A linear layer that reads its weights fast when a step of generation has only a few rows for them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ftk.modules.few_rows import few_rows_linear, may_be_read_by_address, most_rows

FEW_ROWS = 64
"""Up to so many rows (tokens) another kernel is asked: our own where it is the fastest (`few_rows`), else oneDNN's.

`F.linear` in float32 goes to MKL, which packs the weights anew for every product of more than one row. Milliseconds of
MKL against oneDNN for the linear layers of six layers of glm_base (170 MB; one thread, AMD EPYC with AVX-512): 1 row
9.6 and 6.5, 2 rows 18.7 and 10.9, 4 rows 14.7 and 10.1, 8 rows 17.6 and 11.4, 16 rows 23.7 and 14.0.
"""


class Linear(nn.Linear):
    """`nn.Linear`, by `linear`; same parameters, same values."""

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., I] -> [..., O]"""
        return linear(hidden, self.weight, self.bias)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [..., I] times weight [O, I] transposed, plus bias [O]: [..., O]; as `F.linear`, which it mostly is."""
    if _has_few_rows(hidden, weight, bias):
        if hidden.numel() <= most_rows() * hidden.size(-1) and weight.is_contiguous():
            return few_rows_linear(hidden, weight, bias)
        if _has_onednn():
            return torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")
    return F.linear(hidden, weight, bias)


def _has_few_rows(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether this is a step of generation, in float32, that a kernel may make."""
    return (
        may_be_read_by_address(hidden, weight, bias)  # first: sizes that are asked for would be guards of an export
        and hidden.dtype == weight.dtype == torch.float32
        and 0 < hidden.numel() <= FEW_ROWS * hidden.size(-1)
        and weight.dim() == 2
        and hidden.size(-1) == weight.size(1)
        and (bias is None or (bias.dtype == torch.float32 and bias.shape == weight.shape[:1]))
    )


@cache
def _has_onednn() -> bool:
    """Asked once: the operator is torch's own, for compiled models, and promised to nobody."""
    try:
        given, weight = torch.ones(1, 2, 3), torch.ones(4, 3)
        found = torch.ops.mkldnn._linear_pointwise(given, weight, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return found.shape == (1, 2, 4) and bool((found == 3).all())
