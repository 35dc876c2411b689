"""Visibility is one predicate in three forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from ftk.modules import masks
from ftk.modules.masks import Visibility


def slow_mask(visibility: Visibility, num_rows: int, queries: list[list[int]], num_keys: int) -> Tensor:
    """[B, 1, T, S], cell by cell."""
    prefix, causal, branches, documents, length, window, positions, global_keys, _ = (
        part.tolist() if isinstance(part, Tensor) else part for part in visibility
    )
    mask = torch.zeros(num_rows, 1, len(queries[0]), num_keys, dtype=torch.bool)
    for row in range(num_rows):
        for place, query in enumerate(queries[row]):
            for key in range(num_keys):
                seen = key <= query or not causal
                if branches is not None:
                    seen = seen and branches[row][key] in (0, branches[row][query])
                if prefix is not None:
                    seen = seen or key < prefix[row]
                if documents is not None:
                    seen = seen and documents[row][query] == documents[row][key]
                if length is not None:
                    seen = seen and key < length[row]
                if window is not None:
                    of = positions[row] if positions is not None else range(num_keys)
                    last = query if length is None else min(query, length[row] - 1)
                    near = of[last] - of[key] < window and (causal or of[key] - of[last] < window)
                    seen = seen and (near or (global_keys is not None and global_keys[row][key] != 0))
                mask[row, 0, place, key] = seen
    return mask


CASES = {
    "prefix": (Visibility(torch.tensor([0, 3, 8])), 8),
    "one token": (Visibility(torch.tensor([5])), 1),
    "documents": (Visibility(torch.tensor([4, 6]), documents=torch.tensor([[0, 0, 0, 1, 1, 1, 0, 1], [2] * 8])), 8),
    "branches": (
        Visibility(torch.tensor([2, 0]), branches=torch.tensor([[0, 0, 0, 1, 1, 2, 2, -1], [0, 1, 1, 2, 2, 2, 3, 3]])),
        8,
    ),
    "both ways": (Visibility(causal=False, length=torch.tensor([3, 8])), 8),
    "causal": (Visibility(), 8),
    "all": (Visibility(causal=False), 8),
    "window": (Visibility(window=3), 8),
    "window both ways": (Visibility(causal=False, window=3, length=torch.tensor([5, 8])), 8),
    "window and global keys": (
        Visibility(causal=False, window=2, global_keys=torch.tensor([[1, 0, 0, 0, 0, 7, 0, 0], [0] * 8])),
        8,
    ),
    "window of positions": (Visibility(window=2, positions=torch.tensor([[0, 1, 2, 3, 4, 3, 4, 5]])), 8),
}


@pytest.mark.parametrize("case", CASES)
def test_all_forms_equal_the_slow_one(case: str) -> None:
    visibility, num_tokens = CASES[case]
    num_rows = next((len(part) for part in visibility if isinstance(part, Tensor)), 1)
    places = torch.arange(num_tokens)
    expected = slow_mask(visibility, num_rows, [places.tolist()] * num_rows, num_tokens)

    assert torch.equal(visibility.boolean(places, places), expected)
    assert visibility.is_causal_alone is (case == "causal")
    assert visibility.sees_all is (case == "all")

    additive = visibility.additive(places, places)
    assert torch.equal(additive == 0, expected)
    assert torch.equal(additive.isneginf(), ~expected)

    blocks = visibility.blocks(num_tokens, places.device)
    for row in range(num_rows):
        cells = blocks.mask_mod(torch.tensor(row), torch.tensor(0), places[:, None], places[None, :])
        assert torch.equal(cells, expected[row, 0])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_boolean_mask_equals_the_slow_one_for_any_input(data: st.DataObject) -> None:
    num_keys = data.draw(st.integers(1, 9))
    num_rows = data.draw(st.integers(1, 3))

    def drawn(low: int, high: int, count: int) -> list[list[int]]:
        row = st.lists(st.integers(low, high), min_size=count, max_size=count)
        return data.draw(st.lists(row, min_size=num_rows, max_size=num_rows))

    def perhaps(values: list[list[int]], of_a_row: bool = False) -> Tensor | None:
        given = torch.tensor(values)[:, 0] if of_a_row else torch.tensor(values)
        return given if data.draw(st.booleans()) else None

    visibility = Visibility(
        prefix=perhaps(drawn(0, num_keys, 1), of_a_row=True),
        causal=data.draw(st.booleans()),
        branches=perhaps(drawn(-1, 2, num_keys)),
        documents=perhaps(drawn(0, 2, num_keys)),
        length=perhaps(drawn(1, num_keys, 1), of_a_row=True),
        window=data.draw(st.none() | st.integers(1, 9)),
        positions=perhaps(drawn(0, 9, num_keys)),
        global_keys=perhaps(drawn(0, 1, num_keys)),
    )
    queries = drawn(0, num_keys - 1, data.draw(st.integers(1, 4)))
    computed = visibility.boolean(torch.tensor(queries), torch.arange(num_keys))
    assert torch.equal(computed, slow_mask(visibility, num_rows, queries, num_keys))


@pytest.mark.parametrize("with_documents", [False, True])
def test_block_mask_keeps_every_block_that_holds_a_seen_cell(with_documents: bool) -> None:
    num_tokens, size = 256, 64
    documents = (torch.arange(num_tokens) // 96).expand(3, -1) if with_documents else None
    visibility, places = Visibility(torch.tensor([40, 0, 256]), documents=documents), torch.arange(num_tokens)
    dense = visibility.boolean(places, places)
    holds = dense.unflatten(3, (-1, size)).unflatten(2, (-1, size)).any(5).any(3)  # [B, 1, blocks, blocks]
    blocks = visibility.blocks(num_tokens, places.device, block_size=size)
    assert torch.equal(blocks.to_dense().bool(), holds)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_what_the_boolean_mask_gives() -> None:
    from torch.nn import functional as F
    from torch.nn.attention.flex_attention import flex_attention

    visibility, places = Visibility(torch.tensor([5, 0, 20])), torch.arange(24)
    query, key, value = (torch.randn(3, 2, 24, 16) for _ in range(3))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=visibility.boolean(places, places))
    computed = flex_attention(query, key, value, block_mask=visibility.blocks(24, places.device))
    torch.testing.assert_close(computed, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_tokens", [1, 8, 24, 29])
def test_blocks_behind_a_prefix_are_those_of_the_whole_mask(num_tokens, monkeypatch) -> None:
    visibility = Visibility(torch.tensor([0, 1, 7, 8, 9, 16, 23, 24, 28]).clamp(max=num_tokens))
    found = visibility.blocks(num_tokens, torch.device("cpu"), block_size=8)
    made = masks.create_block_mask(
        lambda batch, head, query, key: visibility.sees(batch, query, key),
        9, None, num_tokens, num_tokens, "cpu", BLOCK_SIZE=8,
    )  # fmt: skip
    assert found.seq_lengths == made.seq_lengths
    for own, expected in zip(found.as_tuple(), made.as_tuple(), strict=True):
        if isinstance(expected, Tensor):
            assert (own.dtype, own.is_contiguous()) == (expected.dtype, expected.is_contiguous())
            assert torch.equal(own, expected)
    places = torch.arange(num_tokens)
    assert torch.equal(
        create_mask(found.mask_mod, 9, 1, num_tokens, num_tokens, "cpu"), visibility.boolean(places, places)
    )
    monkeypatch.setattr(masks, "create_block_mask", None)
    visibility.blocks(num_tokens, torch.device("cpu"))  # without the whole mask
    with pytest.raises(TypeError, match="NoneType"):
        visibility._replace(window=3).blocks(num_tokens, torch.device("cpu"))
