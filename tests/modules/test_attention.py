"""Attention against the textbook, and its layout per head."""

from __future__ import annotations

import pytest
import torch

from ftk.errors import UserError
from ftk.modules.attention import Attention
from ftk.modules.feed_forward import FeedForward, GatedFeedForward
from ftk.modules.masked_attention import MaskedAttention
from ftk.modules.masks import Visibility
from ftk.modules.transformer_layer import TransformerLayer


def mask_of(*context_lengths: int, num_tokens: int) -> torch.Tensor:
    places = torch.arange(num_tokens)
    return Visibility(torch.tensor(context_lengths)).boolean(places, places)


def test_attention_equals_a_loop_over_heads() -> None:
    attention = Attention(hidden_size=24, num_heads=3)
    hidden, mask = torch.randn(2, 7, 24), mask_of(3, 0, num_tokens=7)
    weight = attention.qkv.weight.view(3, 3, 8, 24)  # [A, 3, D, H]
    bias = attention.qkv.bias.view(3, 3, 8)
    heads = []
    for head in range(3):
        query, key, value = (hidden @ weight[head, kind].T + bias[head, kind] for kind in range(3))
        scores = query @ key.transpose(1, 2) / 8**0.5
        heads.append(scores.masked_fill(~mask[:, 0], float("-inf")).softmax(-1) @ value)
    expected = attention.output(torch.cat(heads, dim=-1))
    torch.testing.assert_close(attention(hidden, MaskedAttention(mask)), expected, atol=1e-5, rtol=1e-5)


def test_rows_of_whole_heads_are_a_whole_attention() -> None:
    """What tensor parallelism relies on: a shard of the rows computes its own heads, nothing else."""
    whole = Attention(hidden_size=16, num_heads=4)
    hidden, attend = torch.randn(2, 5, 16), MaskedAttention(mask_of(2, 2, num_tokens=5))
    partial_sums = []
    for rank in range(2):
        shard = Attention(hidden_size=16, num_heads=4)
        shard.qkv = torch.nn.Linear(16, 24)
        shard.output = torch.nn.Linear(8, 16, bias=False)
        shard.qkv.weight.data = whole.qkv.weight.data.chunk(2)[rank]
        shard.qkv.bias.data = whole.qkv.bias.data.chunk(2)[rank]
        shard.output.weight.data = whole.output.weight.data.chunk(2, dim=1)[rank]
        partial_sums.append(shard(hidden, attend))
    torch.testing.assert_close(sum(partial_sums) + whole.output.bias, whole(hidden, attend))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="num_attention_heads 3 does not divide hidden_size 16"):
        Attention(hidden_size=16, num_heads=3)


def test_attention_dropout_drops() -> None:
    attention = Attention(hidden_size=16, num_heads=2)
    hidden, mask = torch.randn(1, 6, 16), mask_of(6, num_tokens=6)
    plain = attention(hidden, MaskedAttention(mask))
    assert torch.equal(plain, attention(hidden, MaskedAttention(mask, dropout=0.0)))
    assert not torch.allclose(plain, attention(hidden, MaskedAttention(mask, dropout=0.5)))


def test_feed_forward_uses_the_tanh_gelu() -> None:
    network = FeedForward(8, 32)
    hidden = torch.randn(3, 8)
    x = hidden @ network.inner.weight.T + network.inner.bias
    gelu = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    torch.testing.assert_close(network(hidden), network.output(gelu))


@pytest.mark.parametrize("form", [FeedForward, GatedFeedForward])
def test_feed_forward_has_second_derivatives(form: type[torch.nn.Module]) -> None:
    torch.manual_seed(1)
    network, hidden = form(8, 16, init_std=0.5, output_std=0.5), torch.randn(8)  # type: ignore[call-arg]
    found = torch.autograd.functional.hessian(lambda x: network(x).sum(), hidden)
    of_functions = torch.func.hessian(lambda x: network(x).sum())(hidden)
    exact = torch.autograd.functional.hessian(lambda x: network.double()(x).sum(), hidden.double())
    assert exact.norm() > 0.1
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(of_functions.double(), exact, rtol=1e-3, atol=1e-4)


def test_a_layer_adds_to_its_input() -> None:
    layer = TransformerLayer(Attention(16, 2), FeedForward(16, 64), lambda: torch.nn.LayerNorm(16))
    for linear in (layer.attention.output, layer.feed_forward.output):
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    hidden = torch.randn(1, 4, 16)
    attend = MaskedAttention(mask_of(0, num_tokens=4))
    assert torch.equal(layer(hidden, attend), hidden)
