"""The kernels for a prefix, interpreted, and what is around them."""

from __future__ import annotations

import pytest
import torch

from ftk.modules import varlen_attention
from ftk.modules.attention_forms import sequence_attention
from ftk.modules.flex_attention import HAS_TRITON
from ftk.modules.masks import Visibility
from ftk.modules.prefix_attention import PrefixAttention
from tests.modules.triton_interpreter import run_interpreted


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton, which comes with torch for CUDA")
def test_interpreted_kernels():
    run_interpreted("interpreted_prefix_attention.py")


@pytest.mark.parametrize("are_on", [False, True])
def test_varlen_takes_them_behind_a_prefix_alone_where_passes_are_replayed(are_on, monkeypatch):
    monkeypatch.setattr(varlen_attention, "has_prefix_kernels", lambda device: True)
    monkeypatch.setattr(varlen_attention.Replays, "are_on", are_on)

    def is_taken(num_tokens=32, num_keys=None, **parts):
        visibility = Visibility(prefix=torch.tensor([3, 5]), **parts)
        attend = sequence_attention("varlen", visibility, num_tokens, torch.device("cpu"), num_keys=num_keys)
        is_prefix_attention = isinstance(attend, PrefixAttention)
        if num_keys is None:
            about = visibility, num_tokens, 64, torch.device("cpu")
            assert varlen_attention.is_slow_behind_prefix(*about) != is_prefix_attention
        return is_prefix_attention

    documents = torch.zeros(2, 32, dtype=torch.int64)
    assert is_taken() == are_on
    assert not is_taken(num_tokens=8)
    assert not is_taken(num_keys=40)
    assert not is_taken(documents=documents, num_documents=1)


def test_a_bias_is_added_by_a_mask():
    visibility, bias = Visibility(prefix=torch.tensor([3, 5])), torch.randn(1, 4, 32, 32)
    heads = torch.randn(3, 2, 4, 32, 8).unbind()
    found = PrefixAttention(visibility, 0.0, torch.float32)(*heads, bias=bias)
    expected = sequence_attention("sdpa", visibility, 32, torch.device("cpu"))(*heads, bias=bias)
    torch.testing.assert_close(found, expected)
