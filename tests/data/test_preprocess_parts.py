"""How ftk-preprocess shares out its work: parts of files, texts out of JSON lines, which hashes are new."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.data.text.blocks import MAX_DOCUMENT_BYTES, TOO_LARGE, Block, Part, Problem
from ftk.data.text.chunks import read_chunks
from ftk.data.text.encoding import hash_texts
from ftk.data.text.files import PART_BYTES, cut_file, read_blocks, read_part
from ftk.data.text.preprocess import _tasks
from ftk.data.text.preprocess_config import InputConfig
from ftk.data.text.records import clean_texts, parse_block
from ftk.data.text.shards import shares_of


def blocks_of(path: str, kind: str, part_bytes: int, most: int = MAX_DOCUMENT_BYTES) -> list[Block]:
    items = cut_file(path, kind, part_bytes, most)
    return [read_part(item, most) if isinstance(item, Part) else item for item in items]


@given(
    content=st.lists(st.sampled_from(["a", "bc", "\n", "\n\n", "\r\n", "é", "d" * 20]), max_size=30).map("".join),
    mark=st.booleans(),
    part_bytes=st.integers(1, 30),
)
@settings(max_examples=200, deadline=None)
def test_parts_of_any_size_hold_every_line_once_and_in_order(tmp_path_factory, content, mark, part_bytes):
    path = tmp_path_factory.getbasetemp() / "parts.txt"
    path.write_bytes(b"\xef\xbb\xbf" * mark + content.encode())
    blocks = blocks_of(str(path), "line", part_bytes)
    assert b"".join(block.data for block in blocks) == content.encode()
    line = 1
    raw = path.read_bytes()
    for block in blocks:
        assert raw[block.offset :].startswith(block.data)
        assert not block.data or raw[: block.offset].count(b"\n") + 1 == line
        assert not block.data or block.data.endswith(b"\n") or raw.endswith(block.data)
        line += block.data.count(b"\n")


def test_a_line_longer_than_many_parts_belongs_to_the_part_where_it_begins(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"ab\n" + b"x" * 100_000 + b"\ncd\n")
    sizes = [len(block.data) for block in blocks_of(str(path), "line", 1000)]
    assert sizes[0] == 3 + 100_001
    assert sum(sizes) == sizes[0] + 3


LINES = st.lists(st.sampled_from([b"a", b"bc", b"d" * 9, b"e" * 10, b"f" * 11, b"g" * 50, b""]), max_size=20)


@given(lines=LINES, ended=st.booleans(), most=st.integers(9, 11), part_bytes=st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_lines_that_are_too_large_are_named_and_passed_over(tmp_path_factory, lines, ended, most, part_bytes):
    path = tmp_path_factory.getbasetemp() / "large.txt"
    path.write_bytes(b"\n".join(lines) + b"\n" * ended)
    expected = [
        (number, None if len(line) > most else line.decode())
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1)
    ]
    if expected[-1][1] == "":
        expected.pop()
    offsets = {number: sum(len(line) + 1 for line in lines[: number - 1]) for number, _ in expected}
    for blocks in (
        blocks_of(str(path), "line", part_bytes, most),
        list(read_blocks(str(path), "line", part_bytes, most)),
    ):
        found, before = [], 0
        for block in blocks:
            records = list(parse_block(block, "text", most))
            fast = clean_texts(block, "text", most)
            assert fast is None or fast == [record.text for record in records]
            for record in records:
                line = record.line + (before if block.line == 1 else 0)
                found.append((line, None if isinstance(record, Problem) else record.text))
                assert record.offset == offsets[line]
                assert not isinstance(record, Problem) or record.reason == TOO_LARGE
            before += block.num_lines
        assert found == expected


@pytest.mark.parametrize("block_bytes", [1, 7, 1000])
def test_paragraphs_and_files_that_are_too_large_are_passed_over(tmp_path, block_bytes):
    path = tmp_path / "a.txt"
    long = b"long\n" * 20, b"y" * 60 + b"\n" + b" " * 50
    path.write_bytes(b" \n\none\n\n" + long[0] + b"  \t \n\ntwo\n\n" + long[1] + b"\nthree\n")
    blocks = read_blocks(str(path), "blank-line", block_bytes, 20)
    found = [
        (r.line, r.reason if isinstance(r, Problem) else r.text) for b in blocks for r in parse_block(b, "text", 20)
    ]
    assert found == [(3, "one"), (5, TOO_LARGE), (27, "two"), (29, TOO_LARGE), (31, "three")]
    block, end = read_blocks(str(path), "file", block_bytes, 20)
    assert block.problem.reason == TOO_LARGE
    assert (end.data, end.passed) == (b"", path.stat().st_size)
    (block,) = blocks_of(str(path), "file", 1000, 20)
    assert block.problem.reason == TOO_LARGE


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_a_bomb_of_one_line_takes_no_memory(tmp_path, suffix):
    """A line of 128 MB in a compressed file of kilobytes."""
    if suffix == ".zst":
        pytest.importorskip("zstandard")
    code = """
import bz2, gzip, resource, sys
from ftk.data.text.files import read_blocks
path, most = sys.argv[1], 1 << 20
write = lambda file: [file.write(b"a" * (1 << 20)) for _ in range(128)]
if path.endswith(".zst"):
    import zstandard
    with open(path, "wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as file:
        write(file)
else:
    with (gzip if path.endswith(".gz") else bz2).open(path, "wb") as file:
        write(file)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
block, _ = read_blocks(path, "line", max_document_bytes=most)
print(block.problem.reason, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 50_000)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / f"a.txt{suffix}"], capture_output=True, text=True)
    assert done.stdout.split() == [TOO_LARGE, "True"], done.stderr


def shorten(path):
    os.truncate(path, path.stat().st_size // 2)


def rewrite(path):
    content = path.read_bytes()
    path.write_bytes(content[::-1])
    os.utime(path, ns=(0, 10**18))


def touch(path):
    os.utime(path, ns=(0, 10**18))


def replace(path):
    (path.parent / "other").write_bytes(path.read_bytes())
    os.replace(path.parent / "other", path)


@pytest.mark.parametrize(
    ("change", "message"), [(shorten, "became shorter .* at byte"), (rewrite, "changed"), (replace, "changed")]
)
@pytest.mark.parametrize("kind", ["line", "jsonl", "file"])
def test_a_part_of_a_file_that_has_changed_is_refused(tmp_path, kind, change, message):
    path = tmp_path / "a.txt"
    path.write_bytes(b"the cat\n" * 1000)
    parts = list(cut_file(str(path), kind, 1000))
    read_part(parts[0])
    change(path)
    with pytest.raises(OSError, match=message) as refused:
        read_part(parts[-1])
    assert refused.value.filename == str(path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.bz2", "a.txt.xz", "a.txt.zst"])
@pytest.mark.parametrize(("change", "message"), [(shorten, "became shorter .* at byte"), (touch, "changed")])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, name, change, message):
    path = tmp_path / name
    content = random.Random(1).randbytes(400_000).hex().encode()
    if name.endswith(".zst"):
        content = pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    elif name != "a.txt":
        content = {"gz": gzip, "bz2": bz2, "xz": lzma}[name.split(".")[-1]].compress(content)
    path.write_bytes(content)

    chunks = read_chunks(str(path), 100)
    next(chunks)
    change(path)
    with pytest.raises(OSError, match=message):
        list(chunks)


@pytest.mark.parametrize("kind", ["line", "blank-line"])
def test_of_a_file_that_grows_the_start_is_read_and_the_log_says_so(tmp_path, caplog, kind):
    path = tmp_path / "a.txt"
    path.write_bytes(b"the cat\n\n" * 100_000)
    data = b""
    for item in cut_file(str(path), kind):
        data += (read_part(item) if isinstance(item, Part) else item).data
        if path.stat().st_size == 900_000:
            with open(path, "ab") as file:
                file.write(b"more")
    assert data == b"the cat\n\n" * 100_000
    (message,) = caplog.messages
    assert re.search("grew from 900,000 to 900,004 bytes while it was read; the first 900,000 were read", message)


@pytest.mark.parametrize("kind", ["line", "jsonl", "file"])
def test_compressed_files_are_read_by_one_process_members_and_all(tmp_path, kind):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\n") + gzip.compress(b"three\nfo") + gzip.compress(b"ur\n"))
    items = list(cut_file(str(path), kind))
    assert all(isinstance(item, Block) for item in items)
    assert b"".join(block.data for block in items) == b"one\ntwo\nthree\nfour\n"


@pytest.mark.parametrize(
    ("start", "reason"),
    [(b"\x1f\x8b", "compressed"), (b"BZh11AY&SY", "compressed"), (b"\xff\xfea\x00", "utf16")],
)
def test_a_file_of_another_kind_is_one_problem_whatever_its_size(tmp_path, start, reason):
    path = tmp_path / "a.txt"
    path.write_bytes(start + b"\n" * 1000)
    (block,) = cut_file(str(path), "line", 10)
    assert isinstance(block, Block)
    assert block.problem is not None
    assert block.problem.reason == reason


def test_small_files_go_together_and_large_ones_in_parts(tmp_path):
    sizes = {"a": 10, "b": 0, "c": 3 * PART_BYTES, "d": 20, "e": PART_BYTES - 10, "f": 5}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    paths = [str(tmp_path / name) for name in sizes]
    tasks = [
        [(item.source[-1], item.start) for item in task]
        for task in _tasks(shares_of([(path,) for path in paths], None), InputConfig(trainpref="x"))
    ]
    large = [[("c", i * PART_BYTES)] for i in range(3)]
    assert tasks == [[("a", 0)], *large, [("d", 0)], [("e", 0), ("f", 0)]]


# --- JSON ---


@pytest.mark.parametrize("key", ['a"b', "a\\b", "", "帝", "two words"])
def test_any_key_can_be_asked_for(key):
    text = json.dumps({"other": "x", key: "found", "more": ""}) + "\n"
    assert clean_texts(Block("x", "jsonl", 1, 0, text.encode(), 0), key) == ["found"]


# --- hashes ---


def test_hashes_of_texts_never_change():
    """The split of a corpus depends on them."""
    assert hash_texts(["", "a", "帝"]).tolist() == [13020603013274838756, 3405396810240292928, 9389245057172780363]
