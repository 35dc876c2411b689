"""Keys and values are written in place, each row at its own slots."""

from __future__ import annotations

import torch

from ftk.modules.kv_cache import KeyValueCache, Places


def chunk(num_rows, length, seed):
    torch.manual_seed(seed)
    return torch.randn(num_rows, 2, length, 3), torch.randn(num_rows, 2, length, 3)  # [rows, A, T, D]


def places(*triples):
    return Places(*(torch.tensor(part) for part in zip(*triples, strict=True)))


def test_rows_of_different_lengths_lie_without_holes_and_padding_is_not_written():
    cache = KeyValueCache(2, 6)
    key, value = chunk(2, 3, 0)
    cache.write(key, value, places((0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 0)))  # row 1 has one real token
    more_key, more_value = chunk(2, 2, 1)
    cache.write(more_key, more_value, places((0, 3, 0), (1, 1, 0), (1, 2, 1)))
    keys, values = cache.read(4)
    torch.testing.assert_close(keys[0], torch.cat((key[0], more_key[0, :, :1]), dim=1), rtol=0, atol=0)
    torch.testing.assert_close(values[1, :, :3], torch.cat((value[1, :, :1], more_value[1]), dim=1), rtol=0, atol=0)
    assert not keys[1, :, 3].any()


def test_write_slot_writes_the_same_slot_of_all_rows():
    cache = KeyValueCache(3, 2)
    for slot in range(2):
        key, value = chunk(3, 1, slot)
        cache.write_slot(key, value, slot)
        keys, values = cache.read(slot + 1)
        assert torch.equal(keys[:, :, slot], key[:, :, 0])
        assert torch.equal(values[:, :, slot], value[:, :, 0])


def test_buffers_are_made_once():
    cache = KeyValueCache(4, 8)
    key, value = chunk(4, 1, 0)
    cache.write_slot(key, value, 0)
    place = [part.data_ptr() for part in cache.read(1)]
    for slot in range(1, 8):
        cache.write_slot(key, value, slot)
        cache.select(torch.tensor([3, 3, 0, 1]), slot + 1)
    assert [part.data_ptr() for part in cache.read(8)] == place


def test_select_copies_rows_and_can_leave_some_behind():
    cache = KeyValueCache(3, 2)
    key, value = chunk(3, 1, 0)
    cache.write_slot(key, value, 0)
    cache.select(torch.tensor([2, 0]), 1)
    keys, values = cache.read(1)
    assert torch.equal(keys, key[[2, 0]])
    assert torch.equal(values, value[[2, 0]])
