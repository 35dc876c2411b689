"""Weights that are not finite: found, and said by the commands that copy them."""

from __future__ import annotations

import math

import pytest
import torch

from ftk.checkpoint.finite import non_finite


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_tensor_with_one_bad_element_is_named(dtype: torch.dtype, value: float) -> None:
    if dtype == torch.float8_e4m3fn:
        value = math.nan  # it has no infinity
    good = torch.ones(3, 5)
    bad = good.clone()
    bad[2, 4] = value
    tensors = {"a": good.to(dtype), "b": bad.to(dtype), "c": good.to(dtype)}
    assert non_finite(tensors) == ["b"]


def test_integers_empty_and_meta_tensors_are_finite() -> None:
    assert non_finite({"i": torch.arange(3), "e": torch.empty(0), "m": torch.empty(2, device="meta")}) == []
    assert non_finite({"s": torch.tensor(1e308, dtype=torch.float64)}) == []
