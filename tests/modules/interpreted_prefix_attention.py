"""The kernels of `ftk.modules.prefix_attention` on tensors of the CPU; `test_prefix_attention.py` starts it."""

from __future__ import annotations

import pytest
import torch

from ftk.modules import prefix_attention
from ftk.modules.attention import Attention
from ftk.modules.attention_forms import sequence_attention
from ftk.modules.initialization import draw
from ftk.modules.masks import Visibility
from tests.modules.triton_interpreter import mend_interpreter
from tests.modules.weight_by_weight import errors

mend_interpreter()

SMALL = {"attend": (32, 16, 4, 2), "query_gradients": (32, 16, 4, 2), "key_gradients": (16, 32, 4, 2)}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    for name in ("TILES", "DROPOUT_TILES"):
        monkeypatch.setattr(prefix_attention, name, SMALL)


@pytest.mark.parametrize(
    ("size", "key_heads", "num_tokens", "lengths", "dropout"),
    [(16, 4, 80, [0, 33], 0.0), (8, 2, 67, [67, 50, 1], 0.25), (24, 1, 50, [16, 48], 0.9)],
)
def test_values_and_gradients(size, key_heads, num_tokens, lengths, dropout):
    """What a kernel does not write is NaN, and would be seen where another reads it."""
    torch.use_deterministic_algorithms(True)
    try:
        found = errors(size, key_heads, num_tokens, lengths, dropout, torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert max(found) < 1e-5


class LongQueries(Attention):
    def heads(self, joint):
        query, *others = super().heads(joint)
        return 2.0 * query, *others


@pytest.mark.parametrize(("kind", "head_norm_eps"), [(Attention, None), (Attention, 1e-5), (LongQueries, None)])
def test_a_layer_gives_its_joint_projection_or_single_heads(kind, head_norm_eps):
    layer = kind(48, 4, num_kv_heads=2, head_norm_eps=head_norm_eps, init_std=0.2, output_std=0.2)
    draw(layer, lambda name: True, seed=1)
    hidden = torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(1))
    visibility = Visibility(prefix=torch.tensor([0, 33]))
    results = []
    for attend in (
        prefix_attention.PrefixAttention(visibility, 0.0, torch.float32),
        sequence_attention("sdpa", visibility, 40, hidden.device),
    ):
        found = layer(hidden, attend)
        results.append([found, *torch.autograd.grad(found.square().sum(), layer.parameters())])
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-3)
