"""Batched gathering is a Python loop over look-ups, faster; and it never reads beyond what the index says."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.data.indexed import check as indexed_check
from ftk.data.indexed import dataset as indexed_dataset
from ftk.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from ftk.errors import UserError

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]


def write(prefix: Path, rows: list, dtype: str) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, dtype, overwrite=True) as writer:
        for row in rows:
            writer.add(np.array(row, dtype=dtype))
    return IndexedDataset(prefix)


def slow_gather(rows, indices, pad, length, dtype):
    """The obviously right way: one row after the other."""
    chosen = [rows[index] for index in indices]
    width = max(map(len, chosen), default=0) if length is None else length
    out = np.full((len(chosen), width), pad, dtype=dtype)
    for place, row in enumerate(chosen):
        out[place, : min(len(row), width)] = row[:width]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_gather_is_a_loop_over_rows(tmp_path_factory, dtype, data):
    limits = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else np.iinfo("int16")
    values = st.integers(int(limits.min), int(limits.max))
    rows = data.draw(st.lists(st.lists(values, max_size=9), min_size=1, max_size=9))
    indices = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=40))
    length = data.draw(st.none() | st.integers(0, 12))
    pad = data.draw(values)
    dataset = write(tmp_path_factory.getbasetemp() / f"gather-{dtype}", rows, dtype)
    wide = data.draw(st.booleans()) and np.dtype(dtype).kind in "iu"
    wanted = np.int64 if wide else np.dtype(dtype)
    expected = slow_gather([np.array(row, dtype=dtype) for row in rows], indices, pad, length, wanted)
    got = dataset.gather(indices, pad=pad, length=length, dtype=wanted)
    assert got.dtype == wanted
    np.testing.assert_array_equal(got, expected)
    out = np.ones_like(expected)
    assert dataset.gather(indices, pad=pad, out=out) is out
    np.testing.assert_array_equal(out, expected)
    tokens, offsets = dataset.gather_packed(indices, dtype=wanted)
    assert tokens.dtype == wanted
    assert offsets.tolist() == [0, *np.cumsum([len(rows[index]) for index in indices]).tolist()]
    for place, index in enumerate(indices):
        np.testing.assert_array_equal(tokens[offsets[place] : offsets[place + 1]], np.array(rows[index], dtype=dtype))


def test_packed_rows_go_to_an_array_that_is_used_again(tmp_path):
    dataset = write(tmp_path / "d", [[1], [2, 3], [4, 5, 6]], "uint16")
    room = np.full(8, 9, dtype=np.int64)
    tokens, offsets = dataset.gather_packed([2, 0], out=room)
    assert tokens.base is room
    assert room.tolist() == [4, 5, 6, 1, 9, 9, 9, 9]
    assert offsets.tolist() == [0, 3, 4]
    for bad, message in (
        (np.zeros(3, "u2"), "holds 4 tokens"),
        (np.zeros(8, "f4"), "not as float32"),
        (room[::2], "C-"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset.gather_packed([2, 0], out=bad)


def test_many_rows_with_prefetching_equal_the_loop(tmp_path):
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 60000, size=size).tolist() for size in generator.integers(0, 300, size=500)]
    dataset = write(tmp_path / "d", rows, "uint16")
    indices = generator.integers(0, 500, size=3000)
    np.testing.assert_array_equal(
        dataset.gather(indices, pad=7, dtype=np.int64), slow_gather(rows, indices, 7, None, np.int64)
    )


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64"])
@pytest.mark.parametrize("wanted", [None, np.int64])
def test_wide_rows_are_filled_up_to_their_end(tmp_path, dtype, wanted):
    rows = [[], [1] * 4000, [2], [3] * 9000]
    got = write(tmp_path / "d", rows, dtype).gather([0, 1, 2, 3], pad=77, length=7001, dtype=wanted)
    np.testing.assert_array_equal(got, slow_gather(rows, [0, 1, 2, 3], 77, 7001, got.dtype))


@pytest.mark.parametrize("bad", [4, -5, 2**62, -(2**62)])
def test_a_wrong_index_is_refused_and_nothing_is_written(tmp_path, bad):
    dataset = write(tmp_path / "d", [[1], [2, 3], [], [4]], "uint16")
    out = np.full((3, 2), 9, dtype=np.uint16)
    for call in (lambda i: dataset.gather(i), lambda i: dataset.gather_packed(i), lambda i: dataset.gather(i, out=out)):
        with pytest.raises(IndexError, match=f"sequence {bad} of 4"):
            call([0, bad, 1])
    assert (out == 9).all()


def test_wrong_arguments_are_refused(tmp_path):
    dataset = write(tmp_path / "d", [[1], [2, 3]], "uint16")
    frozen = np.zeros((1, 2), dtype=np.uint16)
    frozen.flags.writeable = False
    cases = {
        "indices are a list of integers": lambda: dataset.gather([0.5]),
        "of shape": lambda: dataset.gather([[0]]),
        "pad is -1, which uint16 does not hold": lambda: dataset.gather([0], pad=-1),
        "pad is 0.5": lambda: dataset.gather([0], pad=0.5),
        "not as int32": lambda: dataset.gather([0], dtype=np.int32),
        "a length of -1": lambda: dataset.gather([0], length=-1),
        "out fixes length": lambda: dataset.gather([0], length=1, out=np.zeros((1, 1), dtype=np.uint16)),
        r"shape \[1, T\]": lambda: dataset.gather([0], out=np.zeros((2, 1), dtype=np.uint16)),
        "C-contiguous and writeable": lambda: dataset.gather([0], out=frozen),
        "not as float64": lambda: dataset.gather_packed([0], dtype=np.float64),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="C-contiguous"):
        dataset.gather([0], out=np.zeros((2, 4), dtype=np.uint16)[:1, ::2])


def test_uint64_is_not_bent_to_int64(tmp_path):
    Path(tmp_path / "f.bin").write_bytes(np.array([2**63], dtype="<u8").tobytes())
    header = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\x0a" + (1).to_bytes(8, "little")
    Path(tmp_path / "f.idx").write_bytes(header + (1).to_bytes(4, "little") + bytes(8))
    dataset = IndexedDataset(tmp_path / "f")
    with pytest.raises(ValueError, match="not as int64"):
        dataset.gather([0], dtype=np.int64)
    assert dataset.gather([0]).tolist() == [[2**63]]


def test_nothing_gathers_nothing(tmp_path):
    dataset = write(tmp_path / "d", [[], []], "int32")
    assert dataset.gather([]).shape == (0, 0)
    assert dataset.gather([0, 1]).shape == (2, 0)
    assert dataset.gather([0, 1], length=2, pad=5).tolist() == [[5, 5], [5, 5]]
    tokens, offsets = dataset.gather_packed([])
    assert tokens.tolist() == []
    assert offsets.tolist() == [0]


@pytest.mark.parametrize("access", ["gather", "gather_packed"])
def test_a_large_index_is_checked_before_the_first_gather(tmp_path, monkeypatch, access):
    write(tmp_path / "d", [[1, 2], [3]], "uint16")
    index = bytearray((tmp_path / "d.idx").read_bytes())
    index[34] = 3
    (tmp_path / "d.idx").write_bytes(index)
    monkeypatch.setattr(indexed_dataset, "_EAGER_CHECK_BYTES", 0)
    dataset = IndexedDataset(tmp_path / "d")
    with pytest.raises(UserError, match="sequence 1 starts at byte 4, inside the one before it"):
        getattr(dataset, access)([1])


def test_the_check_in_slices_finds_what_the_whole_finds(tmp_path, monkeypatch):
    rows = [[1] * (i % 4) for i in range(50)]
    write(tmp_path / "d", rows, "uint16")
    monkeypatch.setattr(indexed_check, "SLICE", 7)
    assert [row.tolist() for row in IndexedDataset(tmp_path / "d")] == rows
    whole = (tmp_path / "d.idx").read_bytes()
    for at in range(34, len(whole)):
        index = bytearray(whole)
        index[at] ^= 0x5A
        (tmp_path / "d.idx").write_bytes(index)
        if at >= 34 + 12 * 50:  # a change of the document index can be legal
            continue
        with pytest.raises(UserError):
            IndexedDataset(tmp_path / "d")


def test_a_copy_in_another_process_is_checked_again_only_if_a_file_has_changed(tmp_path, monkeypatch):
    dataset = write(tmp_path / "d", [[1, 2], [3]], "uint16")
    packed = pickle.dumps(dataset)
    seen = []
    monkeypatch.setattr(indexed_dataset, "check_index", seen.append)
    assert [row.tolist() for row in pickle.loads(packed)] == [[1, 2], [3]]
    assert seen == []
    os.utime(tmp_path / "d.bin", ns=(1, 1))
    again = pickle.loads(packed)
    assert seen == [again]


def test_views_outlive_the_dataset(tmp_path):
    row = write(tmp_path / "d", [[1, 2, 3]], "uint16")[0]
    assert row.tolist() == [1, 2, 3]


def test_threads_gather_at_the_same_time(tmp_path):
    dataset = write(tmp_path / "d", [[i] * 50 for i in range(200)], "int32")
    indices, results = np.arange(200), {}

    def work(number: int) -> None:
        results[number] = all((dataset.gather(indices) == np.arange(200)[:, None]).all() for _ in range(50))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)
