"""Supervised data as it is: rows with their places, splits by the names of files, what is wrong with a file:line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ftk.data.supervised.corpus import RowsConfig, RowsCorpus
from ftk.data.supervised.row import Row
from ftk.data.supervised.rows import read_rows, rows_of, split_of
from ftk.errors import UserError
from ftk.tokenizers import build_tokenizer
from ftk.tokenizers.base import Tokenizer


@pytest.fixture
def tokenizer(model: Path) -> Tokenizer:
    return build_tokenizer("sentencepiece", path=model)


def test_rows_are_objects_of_lines_with_their_places(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"a": "x"}\n\n{"a": "中文", "b": {"c": 1}}\r\n', encoding="utf-8")
    first, second = read_rows(str(file))
    assert (first.values, first.place) == ({"a": "x"}, f"{file}:1")
    assert (second.get("a"), second.get("b.c", int), second.line) == ("中文", 1, 3)
    packed = tmp_path / "train.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert [row.values for row in read_rows(str(packed))] == [first.values, second.values]
    file.write_bytes('{"text": "春眠不觉晓"}'.encode("gb18030"))
    with pytest.raises(UserError, match=r"-f GB18030 -t UTF-8 if it is Chinese \(GBK\)$"):  # there is no `on_error`
        [*read_rows(str(file))]


def test_rows_are_lines_of_two_files(tmp_path: Path) -> None:
    (tmp_path / "train.source").write_text("a b\nc\n", encoding="utf-8")
    (tmp_path / "train.target").write_text("x\ny\n", encoding="utf-8")
    rows = [*read_rows(str(tmp_path / "train.source"))]
    assert [row.values for row in rows] == [{"source": "a b", "target": "x"}, {"source": "c", "target": "y"}]
    (tmp_path / "train.target").write_text("x\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"train.source has 2 lines, .*train.target 1 line; line N of one"):
        [*read_rows(str(tmp_path / "train.source"))]


TABLE = [{"text": 'a, "b"', "label": "1"}, {"text": "中\n\n文", "label": ""}, {"text": "", "label": "-2.5"}]
CSV = 'text,label\r\n"a, ""b""",1\r\n"中\n\n文",\r\n\r\n"",-2.5\r\n'


def test_rows_of_csv_are_texts_that_count_as_numbers_where_these_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + CSV.encode()))
    rows = [*read_rows(str(tmp_path / "train.csv.gz"))]
    assert [row.values for row in rows] == TABLE
    assert [row.line for row in rows] == [2, 3, 7]
    assert [row.idx for row in rows] == [0, 1, 2]
    assert rows[0].get("label", (int, float)) == 1
    assert rows[0].get("label") == "1"
    assert rows[2].get("label", (int, float)) == -2.5
    assert [row.has_label("label", (0, 1)) for row in rows] == [True, False, True]
    with pytest.raises(UserError, match=r"csv.gz:3: field 'label' is ''; it must be a whole number"):
        rows[1].get("label", int)
    without = Row({"label": "-1", "gap": "1.0", "far": "1e999", "idx": "7"}, "f", 3, is_text=True)
    assert (without.has_label("label", (0, 1)), without.has_label("label", ("-1", "1"))) == (False, True)
    assert (without.get("gap", int), without.idx) == (1, 7)
    with pytest.raises(UserError, match="field 'far' is '1e999'; it must be a number"):
        without.get("far", float)


def test_rows_of_tsv_have_no_quotes(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text('source\ttarget\n"a" b\t"c\n', encoding="utf-8")
    assert [row.values for row in read_rows(str(tmp_path / "train.tsv"))] == [{"source": '"a" b', "target": '"c'}]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", "a,b\n1,2\n1,2,3\n", "a.csv:3: has 3 cells, but the header has 2 columns"),
        ("a.csv", "a,a\n", r"a.csv:1: has duplicate column names \(a, a\)"),
        ("a.csv", 'a\n"b" c\n', r"a.csv:2: not CSV \('.' expected after '\"'\)"),
        ("a.csv", 'a\nc\n"b\n\nd\n', r"a.csv:3: not CSV \(unexpected end of data\)"),
        ("a.tsv", "a\tb\n1\r2\t3\n", r"a.tsv:2: not TSV \(new-line character seen in unquoted field\)"),
        ("a.csv", "a\n", "a.csv holds no row"),
        ("a.json", "[]", "a.json holds no row"),
        ("a.json", '[{"a": 1}, 2]', r"a.json:\[1\]: holds 2; a row is a JSON object"),
        ("a.parquet", "PAR1", "a.parquet: not whole .parquet data"),
        ("a.arrow", "ARROW1", "a.arrow: not whole .arrow data"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path: Path, name: str, content: str, problem: str) -> None:
    if not name.endswith((".csv", ".json")):
        pytest.importorskip("pyarrow", reason="needs pyarrow (pip install ftk[data])")
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=problem):
        rows_of(str(tmp_path / name))


def test_rows_of_a_json_list(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps([{"a": 1}, {"a": 2}], indent=1), encoding="utf-8")
    assert [(row.values, row.place, row.idx) for row in read_rows(str(tmp_path / "train.json"))] == [
        ({"a": 1}, f"{tmp_path}/train.json:[0]", 0),
        ({"a": 2}, f"{tmp_path}/train.json:[1]", 1),
    ]


def test_rows_of_tables_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow (pip install ftk[data])")
    parquet = pytest.importorskip("pyarrow.parquet")
    broken = pyarrow.StringArray.from_buffers(1, pyarrow.array([b"\xff"]).buffers()[1], pyarrow.py_buffer(b"\xff"))
    for columns, names, problem in (
        ([broken], ["a"], r"a.parquet: rows 1 to 1 cannot be read \('utf-8' codec can't decode"),
        ([pyarrow.array([1]), pyarrow.array([2])], ["b", "b"], r"a.parquet: has duplicate column names \(b, b\)"),
    ):
        parquet.write_table(pyarrow.Table.from_arrays(columns, names), tmp_path / "a.parquet")
        with pytest.raises(UserError, match=problem):
            rows_of(str(tmp_path / "a.parquet"))


def test_rows_of_tables_keep_their_types(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow (pip install ftk[data])")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"a": "中文", "b": [1, 2], "c": {"d": 0.5}, "e": None}, {"a": "x", "b": [], "c": {"d": 1.0}, "e": 3}]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "one.parquet", row_group_size=1)
    for name, opened in (("two.arrow", pyarrow.ipc.new_file), ("three.arrow", pyarrow.ipc.new_stream)):
        with opened(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    for name in ("one.parquet", "two.arrow", "three.arrow"):
        found = [*read_rows(str(tmp_path / name))]
        assert [row.values for row in found] == rows, name
        assert [row.line for row in found] == [1, 2]


ASKED = [
    {
        "id": "q1",
        "question": "Wer?",
        "answers": [{"text": "Ann", "answer_start": 0}, {"text": "Ann", "answer_start": 9}],
    },
    {"id": "q2", "question": "Wo?", "answers": [], "is_impossible": True},
    {"id": "q3", "question": "Wann?"},
]


@pytest.mark.parametrize("indent", [None, 2])
def test_questions_as_squad_writes_them_are_rows_of_every_task(tmp_path: Path, indent: int | None) -> None:
    file = tmp_path / "dev.json"
    content = {"version": "1", "data": [{"title": "t", "paragraphs": [{"context": "Ann kam.", "qas": ASKED}]}]}
    file.write_text(json.dumps(content, indent=indent), encoding="utf-8")
    first, impossible, unanswered = read_rows(str(file))
    assert first.values == {
        "id": "q1",
        "question": "Wer?",
        "context": "Ann kam.",
        "source": "Wer? Ann kam.",
        "instruction": "Wer?",
        "input": "Ann kam.",
        "answers": ["Ann"],
        **dict.fromkeys(("answer", "target", "output"), "Ann"),
    }
    assert first.place == f"{file}:data[0].paragraphs[0].qas[0]"
    assert (impossible.values["answers"], impossible.values["target"]) == (["N/A"], "N/A")
    assert not {"answers", "answer", "target", "output"} & unanswered.values.keys()
    file.write_text('{"data": 1}\n{"data": [2]}\n', encoding="utf-8")  # a row on each line
    assert [row.values for row in read_rows(str(file))] == [{"data": 1}, {"data": [2]}]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"question": 3}, r"dev.json:data\[0\].paragraphs\[0\].qas\[0\]: field 'question' is 3; it must be a text"),
        ({"answers": []}, r"qas\[0\]: field 'answers' is empty; write at least one, or is_impossible true"),
        ({"answers": ["a"]}, r"qas\[0\]: field 'answers' holds 'a'; it must be a list of objects"),
        ({"answers": [{"text": " "}]}, r"qas\[0\].answers\[0\]: field 'text' is empty"),
    ],
)
def test_what_is_wrong_in_such_a_file_is_named_with_its_place(tmp_path: Path, changed: Any, message: str) -> None:
    qas = [ASKED[0] | changed]
    (tmp_path / "dev.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": "x", "qas": qas}]}]}))
    with pytest.raises(UserError, match=message):
        [*read_rows(str(tmp_path / "dev.json"))]


def test_all_questions_of_the_file_at_hand_are_read(test_data: Path) -> None:
    file = test_data / "seq2seq" / "cmrc2018_trial" / "trial.json"
    if not file.exists():
        pytest.skip(f"{file} is missing")
    rows = [*read_rows(str(file))]
    assert len(rows) == 822 + 94 + 86
    assert all(row.text("answer") in row.text("context") for row in rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]\n", r"train.jsonl:1: holds \[1\]; a row is a JSON object"),
        ('{"a": 1}\n{"a": \n', r"train.jsonl:2: not a JSON object on one line"),
        ("[" * 100_000 + "\n", r"train.jsonl:1: not a JSON object on one line \(nested too deeply\)"),
        ('{"a"：1}\n', r"train.jsonl:1: not a JSON object on one line \('：' at column 5; write ':' there\)"),
    ],
)
def test_a_line_that_is_no_row_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        [*read_rows(str(file))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda row: row.get("lable"), r"f:7: field 'lable' is missing; there is 'label'"),
        (lambda row: row.get("label.name"), r"f:7: field 'label.name' is missing"),
        (lambda row: row.get("text"), r"f:7: field 'text' is None; it must be a text"),
        (lambda row: row.get("flag", int), r"f:7: field 'flag' is True; it must be a whole number"),
        (lambda row: row.get("label", int, (0, 1)), r"f:7: field 'label' is 2; it must be one of 0, 1"),
        (lambda row: row.text("blank"), r"f:7: field 'blank' is empty"),
    ],
)
def test_a_field_that_is_not_as_it_must_be_is_named_with_its_place(call: Any, message: str) -> None:
    row = Row({"text": None, "flag": True, "label": 2, "blank": " \u3000"}, "f", 7)
    with pytest.raises(UserError, match=message):
        call(row)


def test_splits_are_named_by_their_files() -> None:
    names = ["train.jsonl", "val.ndjson.gz", "test.source", "test.target", ".jsonl", "README.md", "x.source.gz"]
    assert [split_of(name) for name in names] == ["train", "val", "test", None, None, None, None]
    tables = ["train.csv", "dev.tsv.gz", "test-00000-of-00001.parquet", "train.parquet.gz", ".csv", "x.arrow"]
    assert [split_of(name) for name in tables] == ["train", "dev", "test", None, None, "x"]


def test_the_rows_of_a_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": "x"}\n', encoding="utf-8")
    (tmp_path / "val.jsonl").write_text('{"a": "y"}\n', encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    corpus = RowsCorpus(RowsConfig(data=str(tmp_path)), tokenizer)
    assert corpus.splits() == ["empty", "train", "val"]
    assert [row.values for row in corpus.rows("valid")] == [{"a": "y"}]
    assert corpus.rows("train") is corpus.rows("train")
    assert RowsCorpus(RowsConfig(data=str(tmp_path), tokenizer_folder=str(corpus.tokenizer_folder))).tokenizer()
    for split, message in (("test", "has no split 'test'; there are: empty, train, val"), ("empty", "holds no row")):
        with pytest.raises(UserError, match=message):
            corpus.rows(split)


def test_a_share_of_the_rows_of_a_file_is_held_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f'{{"a": {number}}}\n' for number in range(40)), encoding="utf-8")
    assert RowsCorpus(RowsConfig(data=str(file)), tokenizer).splits() == ["train"]
    with pytest.raises(UserError, match="no split 'valid'; there are: train; `valid_ratio` holds out some rows of"):
        RowsCorpus(RowsConfig(data=str(file)), tokenizer).rows("valid")
    corpus, again = (RowsCorpus(RowsConfig(data=str(file), valid_ratio=0.1), tokenizer) for _ in range(2))
    assert corpus.splits() == ["train", "valid"]
    train, valid = ([row.values["a"] for row in corpus.rows(split)] for split in ("train", "valid"))
    assert len(valid) == 4
    assert valid != [*range(4)]
    assert sorted(train + valid) == [*range(40)]
    assert (train, valid) == (sorted(train), sorted(valid))
    assert [row.values["a"] for row in again.rows("valid")] == valid
    assert corpus.file("valid") is corpus.file("train") is None
    with open(file, "a") as more:
        more.write('{"a": 40}\n' + f'{{"a": {valid[0]}}}\n')
    grown = RowsCorpus(RowsConfig(data=str(file), valid_ratio=0.1), tokenizer)
    assert len({*valid} - {row.values["a"] for row in grown.rows("valid")}) <= 1
    assert valid[0] not in {row.values["a"] for row in grown.rows("train")}
    with pytest.raises(UserError, match=r"`valid_ratio` 0.01 would hold out 0 of 42 rows; choose one"):
        RowsCorpus(RowsConfig(data=str(file), valid_ratio=0.01), tokenizer).rows("train")
    (tmp_path / "folder").mkdir()
    for name in ("train", "dev"):
        (tmp_path / "folder" / f"{name}.jsonl").write_text('{"a": 1}\n', encoding="utf-8")
    with pytest.raises(UserError, match="`valid_ratio` needs a split train and no split valid; .* has dev, train"):
        RowsCorpus(RowsConfig(data=str(tmp_path / "folder"), valid_ratio=0.5), tokenizer)


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """a and b with 4 and 3 rows to train on, of which b has a split valid; the same with rows of a; and c,d.jsonl."""
    monkeypatch.chdir(tmp_path)
    rows = {"a/train": range(4), "b/train": range(10, 13), "b/dev": [20], "c,d": [30, 31]}
    rows |= {"e": [0, 1, 2, 3, 50, 51, 52, 53], "f/train": [3, 60, 1], "f/dev": [61], "g/train": [1, 3], "g/dev": [61]}
    for path, values in rows.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(f"{path}.jsonl").write_text("".join(f'{{"a": {value}}}\n' for value in values))


@pytest.mark.parametrize(
    ("data", "split", "options", "values"),
    [
        ("a,b", "train", {}, [0, 1, 2, 3, 10, 11, 12]),
        ("b, a", "train", {"data_weights": [0.0, 1.0]}, [10, 11, 12, 0, 1, 2, 3]),
        ("a,b", "valid", {}, [20]),
        ("c,d.jsonl", "train", {}, [30, 31]),
        ("a/train.jsonl,b/dev.jsonl", "train", {}, [0, 1, 2, 3, 20]),
        ("a,b", "valid", {"valid_ratio": 0.5}, [1, 3, 20]),
        ("a,b", "train", {"valid_ratio": 0.5}, [0, 2, 10, 11, 12]),
        ("a,e.jsonl", "valid", {"valid_ratio": 0.5}, [1, 3, 1, 2, 3, 52]),
        ("a,e.jsonl", "train", {"valid_ratio": 0.5}, [0, 0, 50, 51, 53]),
        ("f,a", "train", {"valid_ratio": 0.5}, [60, 0, 2]),
        ("f,a", "train", {}, [3, 60, 1, 0, 1, 2, 3]),
        (
            "a,g",
            "train",
            {"valid_ratio": 0.5},
            "g: other data sets hold out all its rows by `valid_ratio`; leave g out$",
        ),
        ("a,b", "test", {}, "a has no split 'test'; there are: train"),
        ("a,b/dev.jsonl,b", "valid", {"valid_ratio": 0.5}, "dev.jsonl: `valid_ratio` 0.5 would hold out 0 of 1 row"),
        ("b,b", "valid", {"valid_ratio": 0.5}, "needs a split train and no split valid; b has dev, train"),
        ("a,b", "train", {"data_weights": [1.0]}, "`data_weights` 1 are 1 weights, a,b names 2 corpora; give one"),
        ("a,no", "train", {}, "no: no such file or folder"),
        ("a:b", "train", {}, "a:b: no such file or folder"),
        ("a，b", "train", {}, "a，b: corpora are separated by ',', not by '，'"),
        ("a,", "train", {}, "a,: a name is empty; write corpora as A,B$"),
    ],
)
def test_several_data_sets_are_one(sets, data, split, options, values, tokenizer: Tokenizer) -> None:
    def found() -> list[int]:
        return [row.values["a"] for row in RowsCorpus(RowsConfig(data=data, **options), tokenizer).rows(split)]

    if isinstance(values, str):
        with pytest.raises(UserError, match=values):
            found()
    else:
        assert found() == values


def test_what_one_set_holds_out_is_counted_where_it_is_not_trained_on(sets, caplog, tokenizer: Tokenizer) -> None:
    caplog.set_level("INFO")
    corpus = RowsCorpus(RowsConfig(data="f,a", valid_ratio=0.5), tokenizer)
    assert [*map(len, (corpus.rows("train"), corpus.rows("train"), corpus.rows("valid")))] == [3, 3, 3]
    assert caplog.messages == [
        "f: 2 of 3 rows are not trained on, since other data sets hold them out by `valid_ratio`"
    ]
    assert re.fullmatch("1 rows, checksum [0-9a-f]{8} [+] 2 rows, checksum [0-9a-f]{8}", corpus.fingerprint("train"))


def test_every_data_set_is_trained_on(sets, tokenizer: Tokenizer) -> None:
    Path("b/train.jsonl").rename("b/trian.jsonl")
    corpus = RowsCorpus(RowsConfig(data="a,b"), tokenizer)
    assert corpus.splits() == ["dev", "train", "trian"]
    with pytest.raises(UserError, match="b has no split 'train'; there are: dev, trian"):
        corpus.rows("train")
    assert corpus.file("valid") == "b/dev.jsonl"
    assert RowsCorpus(RowsConfig(data="b/dev.jsonl,a"), tokenizer).file("train") is None


def test_rows_are_known_by_their_values_wherever_they_are(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = []
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps({"text": text, "number": 1}) + "\n")
        found.append(RowsCorpus(RowsConfig(data=str(tmp_path / name)), tokenizer).fingerprint("train"))
    assert found[0] == found[1] != found[2]
    assert found[0].startswith("1 rows, checksum ")
    both = RowsCorpus(RowsConfig(data=f"{tmp_path}/a,{tmp_path}/c"), tokenizer).fingerprint("train")
    assert both == f"{found[0]} + {found[2]}"


def test_what_a_folder_of_rows_lacks_is_said(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for folder, message in ((tmp_path, "holds no rows: neither"), (tmp_path / "no", "no such file or folder")):
        with pytest.raises(UserError, match=message):
            RowsCorpus(RowsConfig(data=str(folder)), tokenizer)
    (tmp_path / "train.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(UserError, match="rows have no tokenizer; start from a model by `finetune_from`"):
        RowsCorpus(RowsConfig(data=str(tmp_path)))
    (tmp_path / "train.csv").write_text("a\nb\n", encoding="utf-8")
    assert RowsCorpus(RowsConfig(data=str(tmp_path)), tokenizer).sets[0].files == {
        "train": str(tmp_path / "train.jsonl")
    }
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(UserError, match=r"train.jsonl and train.jsonl.gz are both train; keep one"):
        RowsCorpus(RowsConfig(data=str(tmp_path)), tokenizer)
