"""The indexed dataset reads what it, Megatron and fairseq write, and refuses everything else."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import struct
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.data.indexed import check as indexed_check
from ftk.data.indexed import dataset as indexed_dataset
from ftk.data.indexed._index import flatten
from ftk.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter, optimal_dtype
from ftk.errors import UserError
from tests.data.fairseq_files import fairseq_index
from tests.processes import forked

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]
CODES = {name: code for code, name in enumerate(DTYPES, start=1)}


def write(prefix: Path, sequences: list, dtype: str = "uint16", **options) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, dtype, **options) as writer:
        for sequence in sequences:
            writer.add(sequence)
    return IndexedDataset(prefix)


def megatron_bytes(sequences: list[list[int]], dtype: str, marks: list[int], modes: bool = False) -> bytes:
    """The .idx as the format's table says, by struct alone."""
    itemsize = np.dtype(dtype).itemsize
    pointers, at = [], 0
    for sequence in sequences:
        pointers.append(at)
        at += len(sequence) * itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(marks))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers) + struct.pack(f"<{len(marks)}q", *marks)
    return index + bytes(len(sequences) if modes else 0)


def put(prefix: Path, index: bytes, sequences: list[list[int]], dtype: str) -> None:
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(s, dtype=dtype).tobytes() for s in sequences))


SEQUENCES = [[3, 1, 2], [], [9], [4, 4, 4, 4, 4]]


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_what_is_written_is_read_in_every_dtype(tmp_path_factory, dtype, data):
    numbers = np.dtype(dtype)
    if numbers.kind == "f":
        values = st.floats(width=numbers.itemsize * 8, allow_nan=False)
    else:
        values = st.integers(int(np.iinfo(numbers).min), int(np.iinfo(numbers).max))
    rows = data.draw(st.lists(st.lists(values, max_size=20), max_size=12))
    sequences = [np.array(row, dtype=dtype) for row in rows]
    prefix = tmp_path_factory.mktemp("round") / "train"
    dataset = write(prefix, sequences, dtype)
    assert len(dataset) == len(sequences)
    assert dataset.dtype == numbers
    assert dataset.sizes.tolist() == [len(row) for row in rows]
    assert dataset.num_tokens == sum(map(len, rows))
    for got, given_ in zip((dataset[i] for i in range(len(dataset))), sequences, strict=True):
        assert got.dtype == numbers
        np.testing.assert_array_equal(got, given_)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_megatrons(tmp_path, dtype):
    write(tmp_path / "train", [np.array(s, dtype=dtype) for s in SEQUENCES], dtype)
    assert (tmp_path / "train.idx").read_bytes() == megatron_bytes(SEQUENCES, dtype, [0, 1, 2, 3, 4])
    assert (tmp_path / "train.bin").read_bytes() == b"".join(np.array(s, dtype).tobytes() for s in SEQUENCES)


@pytest.mark.parametrize("modes", [False, True])
def test_megatrons_documents_of_several_sequences_are_read(tmp_path, modes):
    put(tmp_path / "m", megatron_bytes(SEQUENCES, "int32", [0, 3, 3, 4], modes), SEQUENCES, "int32")
    dataset = IndexedDataset(tmp_path / "m")
    assert dataset.dialect == "megatron"
    assert dataset.document_index.tolist() == [0, 3, 3, 4]
    assert dataset.num_documents == 3
    assert [dataset[i].tolist() for i in range(4)] == SEQUENCES


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(4, "int32"), (5, "int64"), (7, "float64"), (8, "uint16"), (9, "uint32"), (10, "uint64")],
)
@pytest.mark.parametrize("sequences", [SEQUENCES, [], [[1]]])
def test_fairseqs_files_are_read(tmp_path, code, dtype, sequences):
    put(tmp_path / "f", fairseq_index(sequences, code, np.dtype(dtype).itemsize), sequences, dtype)
    dataset = IndexedDataset(tmp_path / "f")
    assert dataset.dialect == "fairseq"
    assert dataset.dtype == np.dtype(dtype)
    assert [dataset[i].tolist() for i in range(len(dataset))] == sequences
    assert dataset.document_index.tolist() == list(range(len(sequences) + 1))


def test_code_7_means_float32_in_megatrons_layout(tmp_path):
    put(tmp_path / "m", megatron_bytes(SEQUENCES, "float32", [0, 4]), SEQUENCES, "float32")
    assert IndexedDataset(tmp_path / "m").dtype == np.float32


def test_documents_of_several_sequences_are_written(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", "int32") as writer:
        writer.add([1, 2], end_document=False)
        writer.add([3])
        writer.add_documents(np.array([4, 5, 6]), np.array([1, 2]))
        writer.add([7], end_document=False)
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.document_index.tolist() == [0, 2, 3, 4, 5]
    assert [dataset[i].tolist() for i in range(5)] == [[1, 2], [3], [4], [5, 6], [7]]


def test_many_sequences_pass_through_the_buffers_of_fixed_size(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "_COPY_NUMBERS", 5)
    lengths = np.arange(100) % 11
    tokens = np.arange(lengths.sum(), dtype=np.int64)
    with IndexedDatasetWriter(tmp_path / "d", "int32") as writer:
        writer.add_documents(tokens[: lengths[:40].sum()], lengths[:40])
        for start, length in zip(np.cumsum(lengths)[39:-1], lengths[40:], strict=True):
            writer.add(tokens[start : start + length])
    rows = np.split(tokens, np.cumsum(lengths)[:-1])
    assert (tmp_path / "d.idx").read_bytes() == megatron_bytes([r.tolist() for r in rows], "int32", list(range(101)))
    dataset = IndexedDataset(tmp_path / "d")
    for index, row in enumerate(rows):
        np.testing.assert_array_equal(dataset[index], row)


def test_indexing_is_that_of_a_list(tmp_path):
    dataset = write(tmp_path / "d", SEQUENCES)
    assert dataset[-1].tolist() == SEQUENCES[-1]
    for index in (4, -5):
        with pytest.raises(IndexError):
            dataset[index]
    assert [row.tolist() for row in dataset] == SEQUENCES


def test_a_part_of_a_sequence(tmp_path):
    dataset = write(tmp_path / "d", [[1], [10, 11, 12, 13]])
    assert dataset.get(1).tolist() == [10, 11, 12, 13]
    assert dataset.get(1, 2).tolist() == [12, 13]
    assert dataset.get(1, 1, 2).tolist() == [11, 12]
    assert dataset.get(1, 4).tolist() == []
    for bad in ((1, 5), (1, 3, 2), (1, -1, 1), (1, 0, -1), (0, 0, 5)):
        with pytest.raises(IndexError):
            dataset.get(*bad)


def test_tokens_are_views_that_nobody_can_write_to(tmp_path):
    dataset = write(tmp_path / "d", SEQUENCES)
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        dataset.sizes[0] = 1


def test_a_copy_in_another_process_is_checked_again_only_if_a_file_has_changed(tmp_path, monkeypatch):
    dataset = write(tmp_path / "d", [[1, 2], [3]])
    packed = pickle.dumps(dataset)
    assert len(packed) < 400  # it opens the files anew
    seen = []
    monkeypatch.setattr(indexed_dataset, "check_index", seen.append)
    assert [row.tolist() for row in pickle.loads(packed)] == [[1, 2], [3]]
    assert seen == []
    os.utime(tmp_path / "d.bin", ns=(1, 1))
    again = pickle.loads(packed)
    assert seen == [again]


def test_views_outlive_the_dataset(tmp_path):
    row = write(tmp_path / "d", [[1, 2, 3]])[0]
    assert row.tolist() == [1, 2, 3]


def test_the_token_dtype_follows_the_vocabulary():
    assert optimal_dtype(65499) == np.uint16
    assert optimal_dtype(65500) == np.int32


# --- files that are wrong ---


def altered(at: int, format_: str, value: int):
    def change(index: bytes, data: bytes) -> tuple[bytes, bytes]:
        patch = struct.pack(format_, value)
        return index[:at] + patch + index[at + len(patch) :], data

    return change


SIZES, POINTERS, MARKS = 34, 34 + 4 * 4, 34 + 12 * 4
BAD = {
    "empty index": (lambda i, d: (b"", d), r"d\.idx: 0 bytes, shorter than the header"),
    "header cut": (lambda i, d: (i[:20], d), r"d\.idx: 20 bytes, shorter than the header"),
    "text": (lambda i, d: (b"hello world, this is a text file\n", d), r"d\.idx: not the index"),
    "wrong magic": (altered(0, "<B", 0x6D), r"d\.idx: not the index"),
    "older fairseq": (lambda i, d: (b"TNTIDX\x00\x00" + i[8:], d), r"d\.idx: fairseq's older format"),
    "version 2": (altered(9, "<Q", 2), r"d\.idx: version 2"),
    "dtype code 0": (altered(17, "<B", 0), r"d\.idx: dtype code 0 does not exist"),
    "dtype code 9": (altered(17, "<B", 9), r"d\.idx: dtype code 9 does not exist"),
    "dtype code 255": (altered(17, "<B", 255), r"d\.idx: dtype code 255 does not exist"),
    "other dtype": (altered(17, "<B", 1), r"sequence 1 starts at byte 6, but the one before it ends at 3"),
    "one sequence more": (altered(18, "<Q", 5), r"d\.idx: 122 bytes, but its header announces 5 sequences"),
    "2^63 sequences": (altered(18, "<Q", 1 << 63), r"d\.idx: 122 bytes, but its header announces"),
    "marks gone": (altered(26, "<Q", 0), r"d\.idx: 122 bytes, but its header announces"),
    "index cut": (lambda i, d: (i[:-1], d), r"d\.idx: 121 bytes, but its header announces"),
    "index longer": (lambda i, d: (i + b"\0", d), r"d\.idx: 123 bytes, but its header announces"),
    "negative length": (altered(SIZES + 4, "<i", -1), r"d\.idx: sequence 1 has a length of -1 tokens"),
    "longer length": (altered(SIZES, "<i", 4), r"sequence 1 starts at byte 6, inside the one before it, .* 8"),
    "shorter length": (altered(SIZES, "<i", 2), r"sequence 1 starts at byte 6, but the one before it ends at 4"),
    "huge length": (altered(SIZES + 12, "<i", 2**31 - 1), r"d\.bin: 18 bytes, but sequence 3 ends at byte 4294967302"),
    "last length shorter": (altered(SIZES + 12, "<i", 4), r"d\.bin: 18 bytes, but all sequences end at byte 16"),
    "negative pointer": (altered(POINTERS + 8, "<q", -6), r"sequence 1 starts at byte -6"),
    "first pointer": (altered(POINTERS, "<q", 2), r"sequence 0 starts at byte 2, but the one before it ends at 0"),
    "overlap": (altered(POINTERS + 16, "<q", 4), r"sequence 2 starts at byte 4, inside the one before it"),
    "pointer beyond": (altered(POINTERS + 24, "<q", 1 << 62), r"d\.bin: 18 bytes, but sequence 3 ends at byte"),
    "marks start at 1": (altered(MARKS, "<q", 1), r"entry 0 of the document index is 1"),
    "marks fall": (altered(MARKS + 16, "<q", 0), r"entry 2 of the document index is 0, not 1"),
    "marks end early": (altered(MARKS + 32, "<q", 3), r"entry 4 of the document index is 3, not 4"),
    "marks end late": (altered(MARKS + 32, "<q", 5), r"entry 4 of the document index is 5, not 4"),
    "data cut": (lambda i, d: (i, d[:-2]), r"d\.bin: 16 bytes, but sequence 3 ends at byte 18"),
    "data cut in a token": (lambda i, d: (i, d[:-1]), r"d\.bin: 17 bytes do not divide into uint16 tokens"),
    "data gone": (lambda i, d: (i, b""), r"d\.bin: 0 bytes, but sequence 0 ends at byte 6"),
    "data longer": (lambda i, d: (i, d + b"\0\0"), r"d\.bin: 20 bytes, but all sequences end at byte 18"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("eager", [True, False])
def test_a_wrong_file_is_refused_before_any_token_is_read(tmp_path, monkeypatch, case, eager):
    change, message = BAD[case]
    write(tmp_path / "d", SEQUENCES)
    index, data = change((tmp_path / "d.idx").read_bytes(), (tmp_path / "d.bin").read_bytes())
    (tmp_path / "d.idx").write_bytes(index)
    (tmp_path / "d.bin").write_bytes(data)
    if not eager:
        monkeypatch.setattr(indexed_dataset, "_EAGER_CHECK_BYTES", 0)
    for access in (lambda d: d[0], lambda d: d.get(0), lambda d: d.sizes, lambda d: d.document_index):
        with pytest.raises(UserError, match=message):
            access(IndexedDataset(tmp_path / "d"))


def test_the_check_in_slices_finds_what_the_whole_finds(tmp_path, monkeypatch):
    rows = [[1] * (i % 4) for i in range(50)]
    write(tmp_path / "d", rows)
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


def test_an_empty_document_index_is_refused(tmp_path):
    put(tmp_path / "d", megatron_bytes([], "uint16", []), [], "uint16")
    with pytest.raises(UserError, match="the document index is empty"):
        IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize("missing", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path, missing):
    write(tmp_path / "d", SEQUENCES)
    (tmp_path / f"d.{missing}").unlink()
    with pytest.raises(UserError, match=rf"d\.{missing}: no such file"):
        IndexedDataset(tmp_path / "d")
    (tmp_path / f"d.{missing}").mkdir()
    with pytest.raises(UserError, match=rf"d\.{missing}: not a regular file"):
        IndexedDataset(tmp_path / "d")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_an_index_altered_anywhere_is_refused_or_reads_as_before(tmp_path_factory, data):
    """Whatever one altered or lost byte of the index does, no wrong token comes out.

    A change of the document index alone may leave it legal; then the sequences are those written.
    """
    prefix = tmp_path_factory.getbasetemp() / "altered"
    write(prefix, SEQUENCES, overwrite=True)
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    at = data.draw(st.integers(0, len(index) - 1))
    if data.draw(st.booleans()):
        index[at] = data.draw(st.integers(0, 255))
    else:
        del index[at:]
    Path(f"{prefix}.idx").write_bytes(index)
    try:
        dataset = IndexedDataset(prefix)
        rows = [dataset[i].tolist() for i in range(len(dataset))]
    except UserError:
        return
    # The same bytes may be read as int16: the dtype code is the one field that nothing else contradicts.
    assert rows == SEQUENCES


# --- offsets ---


@pytest.mark.parametrize("limit", [1 << 31, 1 << 32])
def test_pointers_beyond_32_bits(tmp_path, limit):
    """Two long sequences of zeros in a sparse file bring the third beyond the limit."""
    half = limit // 4
    sizes = [half, half, 3, 2]
    pointers = [0, 2 * half, 4 * half, 4 * half + 6]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 5) + struct.pack("<4i", *sizes)
    (tmp_path / "d.idx").write_bytes(index + struct.pack("<4q", *pointers) + struct.pack("<5q", *range(5)))
    with open(tmp_path / "d.bin", "wb") as file:
        file.seek(pointers[2])
        file.write(np.array([7, 8, 9, 10, 11], dtype="<u2").tobytes())
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.sizes.tolist() == sizes
    assert dataset[2].tolist() == [7, 8, 9]
    assert dataset[3].tolist() == [10, 11]
    assert dataset.get(1, half - 1).tolist() == [0]
    assert dataset.num_tokens == 2 * half + 5


def test_pointers_beyond_32_bits_are_written(tmp_path, monkeypatch):
    """The pointers follow from the lengths alone, so the tokens need not be written to see them."""
    monkeypatch.setattr(IndexedDatasetWriter, "_converted", lambda self, array: np.empty(0, dtype=self.dtype))
    fake = np.lib.stride_tricks.as_strided(np.zeros(1, dtype="<i4"), shape=(1 << 30,), strides=(0,))
    with IndexedDatasetWriter(tmp_path / "d", "int32") as writer:
        for _ in range(3):
            writer.add(fake)
    assert struct.unpack_from("<3q", (tmp_path / "d.idx").read_bytes(), 34 + 12) == (0, 1 << 32, 1 << 33)


def test_a_sequence_longer_than_the_format_holds_is_refused(tmp_path):
    with (
        pytest.raises(UserError, match="2147483648 tokens in a sequence"),
        IndexedDatasetWriter(tmp_path / "d", "u1") as w,
    ):
        w.add(np.lib.stride_tricks.as_strided(np.zeros(1, dtype="u1"), shape=(1 << 31,), strides=(0,)))
    assert list(tmp_path.iterdir()) == []


# --- whole or absent ---


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupted_writer_leaves_nothing(tmp_path, error):
    def interrupted():
        with IndexedDatasetWriter(tmp_path / "d", "uint16") as writer:
            writer.add(list(range(1000)))
            raise error

    with pytest.raises(error):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_nothing_has_its_name_before_the_end(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", "uint16") as writer:
        writer.add([1])
        assert not {"d.bin", "d.idx"} & {path.name for path in tmp_path.iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_an_existing_pair_is_replaced_only_when_asked(tmp_path):
    write(tmp_path / "d", [[1]])
    with pytest.raises(UserError, match="exists already"):
        IndexedDatasetWriter(tmp_path / "d", "uint16")
    with pytest.raises(KeyboardInterrupt), IndexedDatasetWriter(tmp_path / "d", "uint16", overwrite=True):
        raise KeyboardInterrupt
    assert IndexedDataset(tmp_path / "d")[0].tolist() == [1]
    assert write(tmp_path / "d", [[2]], overwrite=True)[0].tolist() == [2]


@pytest.mark.parametrize(
    ("ids", "dtype", "message"),
    [
        ([65536], "uint16", "from 65536 to 65536, which do not all fit uint16"),
        ([1, -1], "uint16", "from -1 to 1"),
        ([0.5], "int32", "float64 values"),
        ([2**40], "int32", "from 1099511627776"),
    ],
)
def test_a_token_that_does_not_fit_is_refused(tmp_path, ids, dtype, message):
    with pytest.raises(UserError, match=message), IndexedDatasetWriter(tmp_path / "d", dtype) as writer:
        writer.add(ids)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot hold complex128; choose one of uint8"):
        IndexedDatasetWriter(tmp_path / "d", "complex128")


def _write_to_a_small_disk(prefix: str, limit: int, length: int) -> None:
    """A file-size limit stands for the disk: the write fails with an OSError in the middle."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        with IndexedDatasetWriter(prefix, np.int32) as writer:
            for _ in range(1000):
                writer.add(np.zeros(length, dtype=np.int32))
    except OSError as error:
        sys.exit(error.errno)


@pytest.mark.parametrize(("limit", "length"), [(100_000, 1000), (9_000, 1)], ids=["the .bin stops", "the .idx stops"])
def test_a_full_disk_leaves_nothing(tmp_path, limit, length):
    process = forked(_write_to_a_small_disk, str(tmp_path / "d"), limit, length)
    process.start()
    process.join()
    assert process.exitcode == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


# --- flatten ---


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", "uint8"])
@given(rows=st.lists(st.lists(st.integers(0, 255), max_size=9), max_size=9))
def test_flatten_is_concatenate(dtype, rows):
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    others = [row[::-1].astype(np.int64)[::-1] for row in arrays]
    for given_rows in (rows, arrays, [array("i", row) for row in rows], others):
        tokens, lengths = flatten(given_rows, dtype)
        assert tokens.dtype == np.dtype(dtype)
        assert tokens.tolist() == [token for row in rows for token in row]
        assert lengths.tolist() == [len(row) for row in rows]


def test_flatten_grows_with_long_documents():
    rows = [np.arange(size, dtype=np.int32) for size in (5, 300_000, 0, 70_000, 900_000)]
    tokens, lengths = flatten(rows, "int32")
    np.testing.assert_array_equal(tokens, np.concatenate(rows))
    assert lengths.tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("row", [np.zeros(2, np.float32), np.zeros((1, 2), np.int32), "12"])
def test_flatten_refuses_what_is_no_row_of_ids(row):
    with pytest.raises(TypeError):
        flatten([np.zeros(1, np.int32), row], "uint16")


@pytest.mark.parametrize(("dtype", "token"), [("uint16", 65536), ("uint16", -1), ("int32", 2**31), ("uint8", 256)])
def test_flatten_refuses_a_token_that_does_not_fit(dtype, token):
    with pytest.raises(OverflowError, match=f"token id {token} of document 1"):
        flatten([[1], [2, token]], dtype)


@pytest.mark.parametrize(("dtype", "token"), [("uint16", 65536), ("uint16", -1), ("uint8", 256)])
def test_flatten_refuses_a_token_of_an_array_that_does_not_fit(dtype, token):
    with pytest.raises(OverflowError, match=f"token id {token} of document 2"):
        flatten([np.array(row, dtype=np.int32) for row in ([1], [], [2, token], [token])], dtype)
