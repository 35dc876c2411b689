"""How ftk-preprocess shares out its work: parts of files, texts out of JSON lines, a set of hashes."""

from __future__ import annotations

import gzip
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.data._hash_set import HashSet
from ftk.data._json_texts import json_texts
from ftk.data.encoding import hash_texts
from ftk.data.preprocess import _tasks
from ftk.data.preprocess_config import InputConfig
from ftk.data.records import _clean_json_text
from ftk.data.text import PART_BYTES, Block, Part, cut_file, read_part


def blocks_of(path: str, kind: str, part_bytes: int) -> list[Block]:
    return [read_part(item) if isinstance(item, Part) else item for item in cut_file(path, kind, part_bytes)]


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


@pytest.mark.parametrize("kind", ["line", "jsonl", "file"])
def test_compressed_files_are_read_by_one_process_members_and_all(tmp_path, kind):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\n") + gzip.compress(b"three\nfo") + gzip.compress(b"ur\n"))
    items = list(cut_file(str(path), kind))
    assert all(isinstance(item, Block) for item in items)
    assert b"".join(block.data for block in items) == b"one\ntwo\nthree\nfour\n"


@pytest.mark.parametrize(("start", "reason"), [(b"\x1f\x8b", "compressed"), (b"\xff\xfea\x00", "utf16")])
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
    tasks = [[(item.source[-1], item.start) for item in task] for task in _tasks(paths, InputConfig(trainpref="x"))]
    large = [[("c", i * PART_BYTES)] for i in range(3)]
    assert tasks == [[("a", 0)], *large, [("d", 0)], [("e", 0), ("f", 0)]]


# --- JSON ---

LINES = [
    '{"text": "a", "b": [1, -2.5e3, {"c": null}], "d": "x\\ny"}',
    '{"b":{}, "e":[], "text":"秦川\\n雄\\t\\"帝\\\\宅\\u00e9\\/"}',
    '{"text":"😀a\\r","t":[[],{},[{"text":"inner"}]],"n":-0.5E+10}',
    '{"text":"1","text":"2"}',
    '{"a":{"text":"no"},"text":"yes", "z": [true, false]}',
    '{"":"e","text":"x","w":NaN}',
    *("  ", "", "\u00a0", '{"text": 5}', '{"te\\u0078t": "x"}', "[" * 50, '{"a":' * 40 + "1" + "}" * 40),
]
LETTERS = '{}[]",:\\0123456789.eE+-truefalsn \t\r\x00\x0b\u00a0é秦😀u\n'


def slow_json_texts(text: str, key: str) -> list[str] | None:
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    found = [_clean_json_text(line.removesuffix("\r"), key) for line in lines]
    return None if None in found else found  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(4))
def test_the_scanner_reads_what_pythons_json_reads(seed):
    chosen = random.Random(seed)
    plain = 0
    for _ in range(5000):
        letters = list("\n".join(chosen.choices(LINES, k=chosen.choice((1, 1, 2, 3)))))
        for _ in range(chosen.choice((0, 0, 1, 1, 2, 3))):
            at = chosen.randrange(len(letters) + 1)
            letters[at : at + chosen.choice((0, 1))] = chosen.choice((LETTERS[-1], chosen.choice(LETTERS), ""))
        text = "".join(letters)
        fallen: list[str] = []

        def fallback(line: str, fallen: list[str] = fallen) -> str | None:
            fallen.append(line)
            return _clean_json_text(line, "text")

        assert json_texts(text, "text", fallback) == slow_json_texts(text, "text"), text
        plain += not fallen
    assert plain > 500  # the scanner did the work, not what it falls back on


@pytest.mark.parametrize("key", ['a"b', "a\\b", "", "帝", "two words"])
def test_any_key_can_be_asked_for(key):
    text = json.dumps({"other": "x", key: "found", "more": ""}) + "\n"
    assert json_texts(text, key, lambda line: _clean_json_text(line, key)) == ["found"]


# --- hashes ---


@given(rounds=st.lists(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), max_size=50), max_size=8))
@settings(max_examples=60, deadline=None)
def test_the_hash_set_knows_what_it_has_seen(rounds):
    ours, seen = HashSet(), set()
    for hashes in rounds:
        expected = []
        for value in hashes:
            expected.append(value not in seen)
            seen.add(value)
        assert ours.add(np.array(hashes, dtype=np.uint64)).tolist() == expected
    assert len(ours) == len(seen)


def test_the_hash_set_grows():
    hashes = np.random.default_rng(0).integers(0, 2**64, size=300_000, dtype=np.uint64)
    ours = HashSet()
    assert ours.add(hashes).all()
    assert not ours.add(hashes).any()
    assert len(ours) == 300_000


def test_hashes_of_texts_never_change():
    """The split of a corpus depends on them."""
    assert hash_texts(["", "a", "帝"]).tolist() == [13020603013274838756, 3405396810240292928, 9389245057172780363]
