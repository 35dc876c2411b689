"""Parquet and Arrow files: their rows are the documents, whatever the form; what cannot be read is one line."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import pytest
from preprocessing import run

from ftk.data.corpora.raw_corpus import RawCorpus, RawCorpusConfig
from ftk.data.indexed.dataset import IndexedDataset
from ftk.data.text.files import read_blocks
from ftk.data.text.preprocess_config import TextConfig
from ftk.data.text.records import parse_block, read_documents
from ftk.errors import UserError

pyarrow = pytest.importorskip("pyarrow", reason="needs ftk[data]")
parquet = pytest.importorskip("pyarrow.parquet")

FORMS = ("rows.parquet", "stream.arrow", "file.arrow")
TEXTS = [f"row {number} of\n the table\r\n {'é汉😀' * (number % 3)}" for number in range(300)]


def write(folder, form, columns, rows=70):
    """A table, `rows` in a row group or record batch; gives its path."""
    table, path = pyarrow.table(columns), folder / form
    if form == FORMS[0]:
        parquet.write_table(table, path, row_group_size=rows)
        return str(path)
    writer = pyarrow.ipc.new_stream if form == FORMS[1] else pyarrow.ipc.new_file
    with writer(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=rows)
    return str(path)


def refusal(path, **options):
    with pytest.raises(UserError) as caught:
        list(read_documents([path], TextConfig(**options)))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("column", ["text", "large", "words", "view"])
def test_each_row_is_a_document_with_its_number(tmp_path, form, column):
    kinds = {"text": pyarrow.string(), "large": pyarrow.large_string(), "view": pyarrow.string_view()}
    columns = {name: pyarrow.array(TEXTS, kind) for name, kind in kinds.items()}
    columns |= {"words": pyarrow.array(TEXTS).dictionary_encode(), "id": list(range(300))}
    path = write(tmp_path, form, columns)
    found = list(read_documents([path], TextConfig(text_key=column)))
    assert [document.text for document in found] == TEXTS
    assert [document.line for document in found] == list(range(1, 301))
    blocks = list(read_blocks(path, "rows", 500, column=column))
    assert [one.text for block in blocks for one in parse_block(block)] == TEXTS
    assert max(len(block.data) for block in blocks) < 1000
    assert all(one.disk_bytes <= two.disk_bytes for one, two in pairwise(blocks))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_table_becomes_the_same_data_as_json_lines(tmp_path, model, form, workers):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    paths = {"lines": tmp_path / "rows.jsonl", "table": write(tmp_path, form, {"id": [1] * 300, "text": TEXTS})}
    for name, path in paths.items():
        options = ("--destdir", tmp_path / name, "--tokenizer-path", model, "--workers", workers)
        assert run("--trainpref", path, *options, "--dedup", "--valid-ratio", "0.1") == 0
    for split in ("train", "valid"):
        for end in ("bin", "idx"):
            file = f"{split}.{end}"
            assert (tmp_path / "lines" / file).read_bytes() == (tmp_path / "table" / file).read_bytes()


def test_rows_without_text_are_named_or_skipped_and_counted(tmp_path, model, capsys):
    path = write(tmp_path, FORMS[0], {"body": ["a", None, " ", "b\0", "x" * 50, "a b", None, "c"]}, 3)
    options = ("--destdir", tmp_path / "out", "--tokenizer-path", model, "--text-key", "body")
    assert run("--trainpref", path, *options) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        f'ftk-preprocess: {path}: row 2: the column "body" is null; fill it, or skip such documents'
    )
    assert run("--trainpref", path, *options, "--on-error", "skip", "--max-document-bytes", "40") == 0
    record = json.loads((tmp_path / "out" / "preprocess.json").read_text())["splits"]["train"]
    assert record["skipped"] == {"empty": 1, "null": 2, "nul": 1, "too_large": 1}
    places = [(one["reason"], one["line"], one["offset"]) for one in record["problems"]]
    assert places == [("null", 2, None), ("nul", 4, None), ("too_large", 5, None), ("null", 7, None)]
    assert len(IndexedDataset(tmp_path / "out" / "train")) == 3


@pytest.mark.parametrize("form", FORMS)
def test_columns_that_hold_no_text_are_refused(tmp_path, form):
    path = write(tmp_path, form, {"title": ["a"], "n": [1], "parts": [["a"]], "bytes": [b"a"]})
    assert refusal(path) == ': no column "text" (columns: "title", "n", "parts", "bytes"); choose one with `text_key`'
    for column, kind in (("n", "int64"), ("parts", "list<"), ("bytes", "binary")):
        assert refusal(path, text_key=column).startswith(f': the column "{column}" holds {kind}')


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path, form, share):
    path = write(tmp_path, form, {"text": TEXTS})
    content = (tmp_path / form).read_bytes()
    (tmp_path / form).write_bytes(content[: int(share * len(content))])
    message = refusal(path)
    assert message.startswith(f": not whole {path[path.rindex('.') :]} data (")
    assert message.endswith("); the file is truncated, altered or misnamed")


def test_altered_pages_and_other_files_are_refused(tmp_path):
    path = tmp_path / "sums.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS}), path, write_page_checksum=True, compression="none")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"row 7 of", b"row 8 of"))
    assert ": not whole .parquet data (" in refusal(str(path))
    (tmp_path / "a.txt").write_bytes(content)
    message = refusal(str(tmp_path / "a.txt"))
    assert "the file starts with 50 41 52 31: Parquet data; rename the file to end in .parquet" in message


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = write(tmp_path, FORMS[0], {"text": TEXTS})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refusal(path) == ": reading Parquet and Arrow files needs one more package; pip install 'ftk[data]'"


def test_tables_are_read_without_preprocessing(tmp_path, model):
    assert run("--trainpref", write(tmp_path, FORMS[0], {"text": TEXTS}), "--destdir", tmp_path / "out",
               "--tokenizer-path", model) == 0  # fmt: skip
    folder = tmp_path / "raw"
    folder.mkdir()
    (tmp_path / write(tmp_path, FORMS[1], {"text": TEXTS})).rename(folder / "train.arrow")
    corpus = RawCorpus(RawCorpusConfig(data=str(folder), tokenizer_folder=str(tmp_path / "out")))
    expected = IndexedDataset(tmp_path / "out" / "train")
    found = corpus.documents("train")
    assert len(found) == len(expected) == 300
    assert all(found[number].tolist() == expected[number].tolist() for number in range(300))
