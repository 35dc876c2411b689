"""The three forms of the blank-infilling mask are one mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.modules.masks import additive_mask, blank_predicate, block_mask, boolean_mask


def slow_mask(context_length: list[int], num_tokens: int, documents: list[list[int]] | None) -> torch.Tensor:
    """[B, 1, T, T], cell by cell."""
    mask = torch.zeros(len(context_length), 1, num_tokens, num_tokens, dtype=torch.bool)
    for sample, context in enumerate(context_length):
        for query in range(num_tokens):
            for key in range(num_tokens):
                seen = key <= query or key < context
                if documents is not None:
                    seen = seen and documents[sample][query] == documents[sample][key]
                mask[sample, 0, query, key] = seen
    return mask


CASES = [
    pytest.param([0, 3, 8], 8, None, id="no-context, some, all"),
    pytest.param([5], 1, None, id="one token"),
    pytest.param([4, 6], 8, [[0, 0, 0, 1, 1, 1, 0, 1], [2, 2, 2, 2, 2, 2, 2, 2]], id="documents"),
]


@pytest.mark.parametrize(("context", "num_tokens", "documents"), CASES)
def test_all_forms_equal_the_slow_one(context: list[int], num_tokens: int, documents: list[list[int]] | None) -> None:
    expected = slow_mask(context, num_tokens, documents)
    context_length = torch.tensor(context)
    document_ids = None if documents is None else torch.tensor(documents)

    assert torch.equal(boolean_mask(context_length, num_tokens, document_ids), expected)

    additive = additive_mask(context_length, num_tokens, document_ids)
    assert torch.equal(additive == 0, expected)
    assert torch.equal(additive.isneginf(), ~expected)

    blocks = block_mask(context_length, num_tokens, document_ids)
    places = torch.arange(num_tokens)
    for sample in range(len(context)):
        cells = blocks.mask_mod(torch.tensor(sample), torch.tensor(0), places[:, None], places[None, :])
        assert torch.equal(cells, expected[sample, 0])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_boolean_mask_equals_the_slow_one_for_any_input(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 9))
    context = data.draw(st.lists(st.integers(0, num_tokens), min_size=1, max_size=3))
    row = st.lists(st.integers(0, 2), min_size=num_tokens, max_size=num_tokens)
    documents = data.draw(st.none() | st.lists(row, min_size=len(context), max_size=len(context)))
    document_ids = None if documents is None else torch.tensor(documents)
    computed = boolean_mask(torch.tensor(context), num_tokens, document_ids)
    assert torch.equal(computed, slow_mask(context, num_tokens, documents))


@pytest.mark.parametrize("with_documents", [False, True])
def test_block_mask_keeps_every_block_that_holds_a_seen_cell(with_documents: bool) -> None:
    context_length, num_tokens, size = torch.tensor([40, 0, 256]), 256, 64
    document_ids = (torch.arange(num_tokens) // 96).expand(3, -1) if with_documents else None
    dense = boolean_mask(context_length, num_tokens, document_ids)
    holds = dense.unflatten(3, (-1, size)).unflatten(2, (-1, size)).any(5).any(3)  # [B, 1, blocks, blocks]
    blocks = block_mask(context_length, num_tokens, document_ids, block_size=size)
    assert torch.equal(blocks.to_dense().bool(), holds)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_what_the_boolean_mask_gives() -> None:
    from torch.nn import functional as F
    from torch.nn.attention.flex_attention import flex_attention

    context_length, num_tokens = torch.tensor([5, 0, 20]), 24
    query, key, value = (torch.randn(3, 2, num_tokens, 16) for _ in range(3))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=boolean_mask(context_length, num_tokens))
    computed = flex_attention(query, key, value, block_mask=block_mask(context_length, num_tokens))
    torch.testing.assert_close(computed, expected, atol=1e-5, rtol=0)


def test_predicate_takes_plain_index_tensors() -> None:
    predicate = blank_predicate(torch.tensor([2]))
    zero = torch.tensor(0)
    assert predicate(zero, zero, torch.tensor(0), torch.tensor(1))
    assert not predicate(zero, zero, torch.tensor(0), torch.tensor(2))
