"""The kernels of `ftk.modules.prefix_attention` on tensors of the CPU; `test_prefix_attention.py` starts it."""

from __future__ import annotations

import pytest
import torch

from ftk.modules import prefix_attention
from tests.modules.triton_interpreter import mend_interpreter
from tests.modules.weight_by_weight import errors

mend_interpreter()


@pytest.mark.parametrize(
    ("size", "key_heads", "num_tokens", "lengths", "dropout"),
    [(16, 4, 80, [0, 33], 0.0), (8, 2, 67, [67, 50, 1], 0.25), (24, 1, 50, [16, 48], 0.9)],
)
def test_values_and_gradients(size, key_heads, num_tokens, lengths, dropout, monkeypatch):
    """What a kernel does not write is NaN, and would be seen where another reads it."""
    tiles = {"attend": (32, 16, 4, 2), "query_gradients": (32, 16, 4, 2), "key_gradients": (16, 32, 4, 2)}
    for name in ("TILES", "TILES_OF_DROPOUT"):
        monkeypatch.setattr(prefix_attention, name, tiles)
    torch.use_deterministic_algorithms(True)
    try:
        found = errors(size, key_heads, num_tokens, lengths, dropout, torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert max(found) < 1e-5
