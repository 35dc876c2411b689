"""Looking at the numbers in tensors: whether they are finite, and what to tell a person about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ftk.model_parallel.shards import local


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in arguments or in what a module returns."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for item in values:
            yield from tensors_in(item)
    elif isinstance(values, dict):
        for item in values.values():
            yield from tensors_in(item)


def values_of_gradient(gradient: Tensor | None) -> Tensor | None:
    """A gradient whose numbers can be looked at: of a sparse one those that there are."""
    return gradient.coalesce().values() if gradient is not None and gradient.is_sparse else gradient


def own_numbers(value: Tensor) -> Tensor:
    """Those that this process has."""
    with torch.no_grad():
        return local(value.detach())


def is_finite(value: Tensor) -> bool:
    """Whether all of its numbers are; waits for the device."""
    return not value.is_floating_point() or bool(own_numbers(value).isfinite().all())


def is_bad(value: Tensor) -> bool:
    """Whether there is NaN or +inf in it; -inf is common in masks."""
    return not is_finite(value) and bool((own_numbers(value).isnan() | own_numbers(value).isposinf()).any())


def count_non_finite(value: Tensor) -> str:
    """Such as "2 NaN, 1 -inf of 96 numbers"."""
    value = own_numbers(value)
    counts = {"NaN": int(value.isnan().sum()), "inf": int(value.isposinf().sum()), "-inf": int(value.isneginf().sum())}
    return f"{', '.join(f'{count} {name}' for name, count in counts.items() if count)} of {value.numel()} numbers"


def number_range(value: Tensor) -> str:
    """Such as "-0.5 to 3", of the finite ones."""
    if not value.numel():
        return "no number"
    if value.dtype == torch.bool:
        return "bool"
    value = own_numbers(value)
    finite = value[value.isfinite()] if value.is_floating_point() else value
    return f"{finite.min().item():g} to {finite.max().item():g}" if finite.numel() else "nothing finite"


def number_ranges(values: list[Tensor]) -> str:
    """Of the first three."""
    return "; ".join(number_range(value) for value in values[:3]) or "no tensor"
