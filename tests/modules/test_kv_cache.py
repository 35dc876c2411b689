"""Keys and values are written in place, each row at its own slots."""

from __future__ import annotations

import pytest
import torch

from ftk.modules.kv_cache import KeyValueCache, packed_index


def chunk(num_rows, length, seed):
    torch.manual_seed(seed)
    return torch.randn(num_rows, 2, length, 3), torch.randn(num_rows, 2, length, 3)  # [rows, A, T, D]


def write(cache, key, value, *places):
    """Packed tokens, key and value [1, A, T, D], each to its (row, slot)."""
    rows, slots = (torch.tensor(part) for part in zip(*places, strict=True))
    cache.write(key, value, packed_index(rows, slots, key.size(1), cache.capacity))


def test_rows_of_different_lengths_lie_without_holes():
    cache = KeyValueCache(2, 6)
    key, value = chunk(1, 4, 0)
    write(cache, key, value, (0, 0), (0, 1), (0, 2), (1, 0))
    more_key, more_value = chunk(1, 3, 1)
    write(cache, more_key, more_value, (1, 1), (0, 3), (1, 2))
    keys, values = cache.read(2, 4)
    assert torch.equal(keys[0], torch.cat((key[0, :, :3], more_key[0, :, 1:2]), dim=1))
    assert torch.equal(values[1, :, :3], torch.cat((value[0, :, 3:], more_value[0, :, ::2]), dim=1))
    assert not keys[1, :, 3].any()


def test_a_chunk_goes_to_any_rows_and_others_stay_as_they_were():
    cache = KeyValueCache(4, 3)
    key, value = chunk(1, 2, 0)
    write(cache, key, value, (3, 0), (1, 2))
    keys, values = cache.read(4, 3)
    assert torch.equal(keys[3, :, 0], key[0, :, 0])
    assert torch.equal(values[1, :, 2], value[0, :, 1])
    assert keys.count_nonzero() == key.numel()


def test_what_was_written_is_read_packed():
    cache = KeyValueCache(3, 4)
    key, value = chunk(1, 5, 0)
    write(cache, key, value, (2, 0), (0, 0), (2, 1), (0, 1), (1, 3))
    rows, slots = torch.tensor([0, 0, 2]), torch.tensor([0, 1, 1])
    keys, values = cache.packed(packed_index(rows, slots, 2, 4))  # [S, A, D]
    assert torch.equal(keys, key[0, :, [1, 3, 2]].transpose(0, 1))
    assert torch.equal(values, value[0, :, [1, 3, 2]].transpose(0, 1))


def test_a_step_writes_each_hypothesis_of_each_row_to_its_slot():
    cache = KeyValueCache(3, 5)
    write(cache, *chunk(1, 1, 0), (0, 0))
    slots = torch.tensor([[1, 2], [4, 0]])
    key, value = chunk(2, 2, 1)
    cache.write(key, value, cache.step_index(slots))
    keys, values = cache.read(2, 5)
    for row in range(2):
        for hypothesis in range(2):
            assert torch.equal(keys[row, :, slots[row, hypothesis]], key[row, :, hypothesis])
            assert torch.equal(values[row, :, slots[row, hypothesis]], value[row, :, hypothesis])


@pytest.mark.parametrize("at_once", [True, False])
def test_buffers_are_made_once_and_hold_what_they_say(at_once):
    cache = KeyValueCache(4, 8, like=torch.zeros(2, 3) if at_once else None)
    assert bool(cache.num_bytes) == at_once
    write(cache, *chunk(1, 1, 0), (0, 0))
    place = [part.data_ptr() for part in cache.read(4, 1)]
    for slot in range(1, 8):
        cache.write(*chunk(4, 1, slot), cache.step_index(torch.full((4, 1), slot)))
    assert [part.data_ptr() for part in cache.read(4, 8)] == place
    assert cache.num_bytes == 2 * 4 * 2 * 8 * 3 * 4


def test_rows_are_copied_with_the_slots_that_matter_as_they_were_before_the_first_copy():
    cache = KeyValueCache(3, 2)
    write(cache, *chunk(1, 6, 0), *((row, slot) for row in range(3) for slot in range(2)))
    before = cache.read(3, 2)[0].clone()
    cache.copy([(2, 0, 1), (0, 2, 2)])
    keys, _ = cache.read(3, 2)
    assert torch.equal(keys[0, :, 0], before[2, :, 0])
    assert torch.equal(keys[0, :, 1], before[0, :, 1])
    assert torch.equal(keys[2], before[0])
