"""Reading text: where documents end, what is dropped, what is refused and how that is said."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.data.text.blocks import Block, Problem
from ftk.data.text.files import read_blocks
from ftk.data.text.paths import expand_paths, kind_of
from ftk.data.text.preprocess_config import TextConfig
from ftk.data.text.records import clean_texts, is_empty, parse_block, read_documents
from ftk.errors import UserError


def write(folder, content: bytes | str, name: str = "corpus.txt") -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def texts(path: str, **options) -> list[str]:
    return [document.text for document in read_documents([path], TextConfig(**options))]


def refusal(path: str, **options) -> str:
    with pytest.raises(UserError) as caught:
        list(read_documents([path], TextConfig(**options)))
    return str(caught.value).removeprefix(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", []),
        ("\n\n\n", []),
        ("one\ntwo", ["one", "two"]),
        ("one\ntwo\n", ["one", "two"]),
        ("one\r\ntwo\r\n", ["one", "two"]),
        ("one\rtwo\r", ["one\rtwo"]),
        ("one\n\rtwo", ["one", "\rtwo"]),
        (" one \n\t\n　\ntwo", [" one ", "two"]),
        ("a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\nh", ["a\u2028b\u2029c\x85d\x0be\x0cf\x1cg", "h"]),
        ("\ufeffone\n\ufefftwo", ["one", "\ufefftwo"]),
    ],
)
def test_a_document_is_a_line_that_ends_at_a_newline(tmp_path, content, expected):
    assert texts(write(tmp_path, content)) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\nb\n\nc\n", ["a\nb", "c"]),
        ("\n\n a\nb\n \t\r\n\n\nc", [" a\nb", "c"]),
        ("a\r\nb\r\n\r\nc\r\n", ["a\nb", "c"]),
        ("a\n\n", ["a"]),
        ("\n \n", []),
        ("a", ["a"]),
    ],
)
def test_a_document_ends_at_a_blank_line(tmp_path, content, expected):
    assert texts(write(tmp_path, content), document_separator="blank-line") == expected


def test_a_document_is_a_file(tmp_path):
    folder = tmp_path / "files"
    (folder / "deep").mkdir(parents=True)
    write(folder, "a\n\nb\r\n", "2.txt")
    write(folder, "first", "1.txt")
    write(folder / "deep", "third\n", "0.txt")
    paths = expand_paths(str(folder), "file")
    assert [document.text for document in read_documents(paths, TextConfig(document_separator="file"))] == [
        "first",
        "a\n\nb",
        "third",
    ]


@pytest.fixture
def many(tmp_path):
    """A folder of files of which most hold no documents."""
    names = ["b.txt", "a/z.jsonl.gz", "a/y.PARQUET", "c.arrow", "a/code.py", "README.md"]
    hidden = [".hidden.txt", ".git/a.txt", "a/.b/c.txt"]
    for name in (*names, *hidden, "state.json", "a/dataset_info.json", "cache-1f.arrow", "dataset_dict.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path, "a", name)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        ("", {}, ["a/y.PARQUET", "a/z.jsonl.gz", "b.txt", "c.arrow"]),
        ("", {"format": "text"}, ["README.md", "a/code.py", "a/y.PARQUET", "a/z.jsonl.gz", "b.txt", "c.arrow"]),
        ("a", {"separator": "file"}, ["a/code.py", "a/y.PARQUET", "a/z.jsonl.gz"]),
        ("**/*.py", {}, ["a/code.py"]),
        ("?.*", {}, ["b.txt", "c.arrow"]),
        ("*.json", {}, None),
        ("*.none", {}, None),
        ("a/.b", {}, ["a/.b/c.txt"]),
    ],
)
def test_folders_and_patterns_stand_for_files_by_their_names(many, caplog, given, options, expected):
    if expected is None:
        with pytest.raises(UserError, match="no file matches this pattern"):
            expand_paths(f"{many}/{given}", **options)
        return
    with caplog.at_level("INFO"):
        found = expand_paths(f"{many}/{given}", **options)
    assert found == [f"{many}/{name}" for name in expected]
    assert f"{many}/{given}: reading {len(expected)} file" in caplog.text
    others = "6 others not taken (README.md, code.py, dataset_info.json ...)"
    assert (others in caplog.text) == (given == "" and not options)


def test_a_folder_without_documents_is_refused(many):
    (many / "a" / "code").mkdir()
    write(many, "a", "a/code/x.py")
    with pytest.raises(UserError, match=r"code: no file to read \(1 other file\); names must end in \.txt, "):
        expand_paths(f"{many}/a/code")


@pytest.mark.parametrize("separator", ["line", "blank-line", "file"])
@given(
    content=st.lists(st.sampled_from(["a", "bc", "\n", "\n\n", " ", "\r\n", "\n \n", "é"]), max_size=30).map("".join)
)
@settings(max_examples=60, deadline=None)
def test_blocks_of_any_size_give_the_same_documents_at_the_same_places(tmp_path_factory, separator, content):
    path = write(tmp_path_factory.getbasetemp(), content, f"blocks-{separator}.txt")

    def records(block_bytes: int) -> list:
        return [r for block in read_blocks(path, separator, block_bytes) for r in parse_block(block)]

    whole = records(1 << 20)
    for block_bytes in (1, 2, 3, 7):
        documents = [r for r in records(block_bytes) if not is_empty(r.text)]
        assert documents == [r for r in whole if not is_empty(r.text)]
    raw = content.encode()
    for record in whole:
        assert raw[record.offset :].decode().replace("\r\n", "\n").startswith(record.text)
        assert record.line == 1 + raw.count(b"\n", 0, record.offset)


ODD = ["a", "é", "\n", "\r\n", "\r", "\x00", "\x85", "\u2028", " ", "　"]
ODD_JSON = [
    *('{"text": "a"}', '{"text": ""}', '{"text": "\\u00e9"}', '{"text": "\\ud83d\\ude00"}', "", " ", "[1]", '"text"'),
    *('{"text": "\\ud83d"}', '{"text": "\\u0000"}', '{"text": 1}', "{}", "{", '{"text": "\t"}', '{"text":"a"}{}'),
    '{"text": "a", "b": [1, -2.5e3, {"c": null}], "d": "x\\ny"}',
    '{"b":{}, "e":[], "text":"秦川\\n雄\\t\\"帝\\\\宅\\u00e9\\/"}',
    '{"text":"😀a\\r","t":[[],{},[{"text":"inner"}]],"n":-0.5E+10}',
    '{"text":"1","text":"2"}',
    '{"a":{"text":"no"},"text":"yes", "z": [true, false]}',
    '{"":"e","text":"x","w":NaN}',
    *("\u00a0", '{"te\\u0078t": "x"}', "[" * 50, '{"a":' * 40 + "1" + "}" * 40),
]
LETTERS = '{}[]",:\\0123456789.eE+-truefalsn \t\r\x00\x0b\u00a0é秦😀u\n'


@pytest.mark.parametrize(("kind", "without"), [("line", ()), ("jsonl", ()), ("jsonl", ("orjson",))])
@given(data=st.data())
@settings(max_examples=500, deadline=None)
def test_the_fast_way_reads_what_the_slow_way_reads(kind, without, data):
    if kind == "line":
        content = "".join(data.draw(st.lists(st.sampled_from(ODD), max_size=12))).encode()
        content += data.draw(st.sampled_from([b"", b"", b"\xff", b"\n\xe4\xbd\n"]))
    else:
        ending = data.draw(st.sampled_from(["\n", "\r\n"]))
        text = "".join(f"{line}{ending}" for line in data.draw(st.lists(st.sampled_from(ODD_JSON), max_size=3)))
        for letter in data.draw(st.lists(st.sampled_from(["", *LETTERS]), max_size=2)):  # replaces or removes one
            at = data.draw(st.integers(0, len(text)))
            text = text[:at] + letter + text[at + 1 :]
        content = text.encode()
    block = Block("a", kind, 1, 0, content, 0)
    records = list(parse_block(block))
    with mock.patch.dict(sys.modules, dict.fromkeys(without)):  # None: it cannot be imported
        fast = clean_texts(block)
    if any(isinstance(record, Problem) for record in records):
        assert fast is None
    elif kind == "line":
        assert fast == [record.text for record in records]
    else:  # lines of white space may be "" in one and as they are in the other: both are empty documents
        assert [t for t in fast if not is_empty(t)] == [r.text for r in records if not is_empty(r.text)]
        assert len(fast) == len(records)


def test_blocks_end_where_documents_end_and_stay_small(tmp_path):
    path = write(tmp_path, "".join(f"line {i}\n" for i in range(1000)))
    blocks = list(read_blocks(path, "line", 100))
    assert max(len(block.data) for block in blocks) <= 200
    assert all(block.data.endswith(b"\n") for block in blocks)
    assert b"".join(block.data for block in blocks).decode() == "".join(f"line {i}\n" for i in range(1000))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_files_are_read_by_name_and_never_half(tmp_path, suffix):
    content = "".join(f"document number {i} é\n" for i in range(5000))
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard", reason="needs ftk[zstd]")
        pack = zstandard.ZstdCompressor().compress
    else:
        pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[suffix]
    middle = content.index("\n", len(content) // 2) + 1
    packed = pack(content[:middle].encode()) + pack(content[middle:].encode())  # two streams, one after the other
    path = write(tmp_path, packed, f"corpus.txt{suffix}")
    assert texts(path) == content.splitlines()
    for broken in (
        packed[:-9],
        packed[: len(packed) // 4],
        packed[:40] + b"\xff" * 30 + packed[70:],
        b"plain text\n" * 9,
    ):
        path = write(tmp_path, broken, f"broken.txt{suffix}")
        assert refusal(path).startswith(f": not whole {suffix} data (")


def test_zstandard_without_its_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "pip install 'ftk[zstd]'" in refusal(write(tmp_path, b"", "a.txt.zst"))


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (gzip.compress(b"x", mtime=0), "gzip data; rename the file to end in .gz"),
        (bz2.compress(b"x"), "bzip2 data"),
        (lzma.compress(b"x"), "xz data"),
        (b"\x28\xb5\x2f\xfd....", "Zstandard data"),
        (b"PK\x03\x04....", "zip archive"),
        ("text".encode("utf-16"), "UTF-16 text; convert it to UTF-8"),
    ],
)
def test_other_data_is_named_by_its_first_bytes(tmp_path, start, message):
    assert message in refusal(write(tmp_path, start))


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        (b"good\nbad \x80\n", "2: (byte 9) ", "invalid UTF-8 (0x80: invalid start byte)"),
        (b"\xef\xbb\xbfgood\n\xe4\xbd\n", "2: (byte 8) ", "invalid UTF-8 (0xE4"),
        (b"a\x00b\n", "1: (byte 1) ", "a NUL byte"),
        (b"a\n\xed\xa0\x80", "2: (byte 2) ", "invalid UTF-8 (0xED"),
    ],
)
@pytest.mark.parametrize("separator", ["line", "file"])
def test_a_byte_that_is_not_text_is_placed(tmp_path, content, place, message, separator):
    found = refusal(write(tmp_path, content), document_separator=separator)
    assert found.startswith(f":{place}{message}")
    assert "`on_error` skip" in found


def test_the_byte_is_placed_behind_carriage_returns_too(tmp_path):
    path = write(tmp_path, b"a\r\n\r\nb\r\nc\r\nd \xff\r\n")
    assert refusal(path, document_separator="blank-line").startswith(":5: (byte 13) invalid UTF-8")


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        ('{"text": "cut', "invalid_json", "(byte 21) not JSON (Unterminated string starting at column 10)"),
        ('{"title": "好"，"text": ""}', "invalid_json", "not JSON ('，' at column 14; write ',' there); correct it"),
        ('  {"text"：1}', "invalid_json", "not JSON ('：' at column 10; write ':' there); correct it"),
        ('{"text"，1}', "invalid_json", "not JSON (Expecting ':' delimiter at column 8); correct it"),
        ('{"text": "said “”" ok"}', "invalid_json", "not JSON (Expecting ',' delimiter at column 20); correct it"),
        ('{"text": "a"}，{"text": "b"}', "invalid_json", "more than one JSON value; write one object on each line"),
        ("{“text”: “a”}", "invalid_json", "not JSON ('“' at column 2; write '\"' there); correct it"),
        ('\ufeff{"text": "a"}', "invalid_json", "not JSON (a byte order mark at column 1; remove it)"),
        ("{", "invalid_json", "(byte 13) not JSON"),
        ("{'text': 'a'}", "invalid_json", "not JSON"),
        ('{"text": "tab\there"}', "invalid_json", "not JSON (Invalid control character"),
        ('{"text":"a"}{"text":"b"}', "invalid_json", "more than one JSON value; write one object on each line"),
        ("[" * 100_000, "invalid_json", "JSON"),
        (
            "[1]",
            "not_an_object",
            "(byte 12) a list, not an object; write one object on each line (jq -c '.[]' FILE does)",
        ),
        ('[{"text": "a"},', "invalid_json", "write one object on each line (jq -c '.[]' FILE does)"),
        ("null", "not_an_object", "null, not an object"),
        ('"text"', "not_an_object", "a string, not an object"),
        ('{"title": "a", "body": "b"}', "missing_key", 'no field "text" (fields: "title", "body"); choose one'),
        ("{}", "missing_key", 'no field "text" (fields: none)'),
        ('{"text": 5}', "wrong_type", 'field "text" is a number, not a string'),
        ('{"text": null}', "wrong_type", 'field "text" is null'),
        ('{"text": true}', "wrong_type", 'field "text" is a boolean'),
        ('{"text": ["a"]}', "wrong_type", 'field "text" is a list'),
        ('{"text": "nul \\u0000"}', "nul", 'field "text" holds a NUL character'),
        ('{"text": "\\ud800 alone"}', "lone_surrogate", 'field "text" holds half a surrogate pair'),
    ],
)
def test_a_bad_json_line_is_placed_and_explained(tmp_path, line, reason, message):
    path = write(tmp_path, f'{{"text":"é"}}\n{line}\n{{"text":"good"}}\n', "corpus.jsonl")
    assert len('{"text":"é"}\n'.encode()) == 14
    found = refusal(path)
    assert found.startswith(":2: (byte ")
    assert (
        message.replace("(byte 13)", "(byte 15)").replace("(byte 12)", "(byte 14)").replace("(byte 21)", "(byte 23)")
        in found
    )
    problems: list[Problem] = []
    skipping = TextConfig(on_error="skip")
    left = [document.text for document in read_documents([path], skipping, on_problem=problems.append)]
    assert left == ["é", "good"]
    assert [problem.reason for problem in problems] == [reason]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text":"first","text":"second"}', "second"),
        ('{"text":"a","w":NaN,"v":-Infinity,"u":1e999}', "a"),
        ('{"n": ' + "9" * 5000 + ', "text":"a"}', "a"),
        ('{"text":"\\ud83d\\ude00"}', "😀"),
        ('{"text":"a\\nb\\u2028c"}', "a\nb\u2028c"),
        ('  {"text":"a"}  ', "a"),
    ],
)
def test_what_pythons_json_reads_is_read(tmp_path, line, text):
    assert texts(write(tmp_path, line + "\r\n", "corpus.jsonl")) == [text]


@given(st.lists(st.text(), max_size=8))
@settings(max_examples=50, deadline=None)
def test_any_json_text_comes_back(tmp_path_factory, strings):
    strings = [string.replace("\0", "") for string in strings]
    path = write(tmp_path_factory.getbasetemp(), "".join(json.dumps({"body": s}) + "\n" for s in strings), "any.jsonl")
    assert texts(path, text_key="body") == [string for string in strings if not is_empty(string)]


@pytest.mark.parametrize(
    ("name", "format", "kind"),
    [
        ("a.jsonl", "auto", "jsonl"),
        ("a.JSONL.gz", "auto", "jsonl"),
        ("a.json.zst", "auto", "jsonl"),
        ("a.ndjson", "auto", "jsonl"),
        ("a.txt.gz", "auto", "line"),
        ("jsonl", "auto", "line"),
        ("a.jsonl", "text", "line"),
        ("a.Parquet", "auto", "rows"),
        ("a.arrow", "auto", "rows"),
        ("a.arrow", "jsonl", "jsonl"),
        ("a.txt", "jsonl", "jsonl"),
    ],
)
def test_the_format_follows_the_name(name, format, kind):
    assert kind_of(name, format) == kind


def test_missing_files_and_folders_are_refused(tmp_path):
    present = write(tmp_path, "a")
    assert expand_paths(f"{present}, {present}") == [present, present]
    with pytest.raises(UserError, match=r"nothing\.txt: no such file"):
        expand_paths(f"{present},nothing.txt")
    with pytest.raises(UserError, match="names no file"):
        expand_paths(",")
