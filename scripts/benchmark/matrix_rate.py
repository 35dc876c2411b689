"""How fast this machine multiplies matrices of the very shapes that a training step multiplies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ftk.models.glm import GLMConfig

PASSES = 3  # forward, gradient of the input, gradient of the weight: as many multiplications each


@dataclass(frozen=True)
class Product:
    """`count` linear layers a step that map [rows, inputs] to [rows, outputs]."""

    rows: int
    inputs: int
    outputs: int
    count: int

    @property
    def flops(self) -> int:
        """Of forward and backward; a multiplication and an addition are two."""
        return PASSES * 2 * self.rows * self.inputs * self.outputs * self.count


def linear_products(config: GLMConfig, num_tokens: int, num_logits: int) -> list[Product]:
    """The linear layers of one step on `num_tokens` places, with logits at `num_logits` of them."""
    hidden, inner, layers = config.hidden_size, config.inner_size, config.num_layers
    return [
        Product(num_tokens, hidden, 3 * hidden, layers),
        Product(num_tokens, hidden, hidden, layers),
        Product(num_tokens, hidden, inner, layers),
        Product(num_tokens, inner, hidden, layers),
        Product(num_logits, hidden, config.vocab_size, 1),
    ]


def matrix_rate(products: list[Product], dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the products alone: their operations over the time that their passes take, each at its best.

    Args:
        products: as of `linear_products`.
        dtype: of all matrices.
        device: where.
    """
    seconds = 0.0
    for product in products:
        given = torch.randn(product.rows, product.inputs, device=device).to(dtype)
        weight = torch.randn(product.outputs, product.inputs, device=device).to(dtype)
        gradient = torch.randn(product.rows, product.outputs, device=device).to(dtype)
        for work in _passes(given, weight, gradient):
            seconds += product.count * best_seconds(work, device, 3)
    return sum(product.flops for product in products) / seconds


def _passes(given: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> Iterator[Callable[[], torch.Tensor]]:
    yield lambda: given @ weight.T
    yield lambda: gradient @ weight
    yield lambda: gradient.T @ given


def best_seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The best of `rounds` tries after one that warms up; on a GPU a try is ten calls in a row."""
    calls = 10 if device.type == "cuda" else 1
    work()
    best = float("inf")
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        best = min(best, (time.perf_counter() - began) / calls)
    return best


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
