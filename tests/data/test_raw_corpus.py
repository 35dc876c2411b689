"""The raw dataset: text files are tokenised when they are opened."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from ftk.config.options import mistakes
from ftk.data.corpora.raw_corpus import RawCorpus, RawCorpusConfig
from ftk.errors import UserError
from ftk.tokenizers import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in "abc"))
    build_tokenizer("fairseq_dict", path=folder / "dict.txt").save(folder / "saved")
    return folder / "saved"


@pytest.fixture
def raw(tokenizer_folder):
    def make(data, **options) -> RawCorpus:
        config = RawCorpusConfig(data=str(data), tokenizer_folder=str(tokenizer_folder), **options)
        assert mistakes(config) == []
        return RawCorpus(config)

    return make


def rows(documents) -> list[list[int]]:
    assert [len(documents[i]) for i in range(len(documents))] == documents.sizes.tolist()
    assert documents.tokens.tolist() == [token for i in range(len(documents)) for token in documents[i].tolist()]
    return [documents[i].tolist() for i in range(len(documents))]


def test_a_folder_of_text_and_jsonl(tmp_path, raw, tokenizer_folder):
    (tmp_path / "train.txt").write_text("a b\n\nc\u2028c\n")
    (tmp_path / "valid.jsonl").write_text('{"body": "b"}\n{"body": "a a"}\n')
    (tmp_path / "test.txt.gz").write_bytes(gzip.compress(b"c\n"))
    (tmp_path / "README.md").write_text("not a split")
    corpus = raw(tmp_path, text_key="body")
    assert corpus.splits() == ["test", "train", "valid"]
    assert rows(corpus.documents("train")) == [[4, 5], [6, 6]]
    assert rows(corpus.documents("valid")) == [[5], [4, 4]]
    assert rows(corpus.documents("test")) == [[6]]
    assert corpus.documents("train") is corpus.documents("train")
    assert corpus.documents("train").tokens.dtype == np.uint16
    assert corpus.tokenizer_folder == tokenizer_folder
    assert corpus.tokenizer().encode("c") == [6]
    with pytest.raises(UserError, match="has no split 'dev'; there are: test, train, valid"):
        corpus.documents("dev")
    with pytest.raises(IndexError, match="document 2 of 2"):
        corpus.documents("train")[2]


def test_a_file_of_another_name_is_read_as_it_is_said(tmp_path, raw):
    (tmp_path / "lines").write_text('{"text": "a b"}\n{"text": "c"}\n')
    assert rows(raw(tmp_path / "lines", text_format="jsonl").documents("train")) == [[4, 5], [6]]


def test_files_are_named_with_their_splits(tmp_path, raw):
    for name, text in (("one.txt", "a\n"), ("two.txt", "b\n"), ("three.txt", "c\n")):
        (tmp_path / name).write_text(text)
    assert rows(raw(tmp_path / "one.txt").documents("train")) == [[4]]
    corpus = raw(f"{tmp_path}/one.txt,valid={tmp_path}/three.txt,train={tmp_path}/two.txt")
    assert rows(corpus.documents("train")) == [[4], [5]]
    assert rows(corpus.documents("valid")) == [[6]]
    for wrong, message in ((f"valid={tmp_path}/none.txt", "none.txt: no such file"), (" , ", "names no file")):
        with pytest.raises(UserError, match=message):
            raw(wrong)


def test_what_cannot_be_read_stops_or_is_skipped(tmp_path, raw, caplog):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": 1}\n{"text": "b"}\n')
    with pytest.raises(UserError, match=r"train.jsonl:2: .*field \"text\" is a number"):
        raw(tmp_path).documents("train")
    with caplog.at_level(logging.WARNING):
        assert rows(raw(tmp_path, on_error="skip").documents("train")) == [[4], [5]]
    assert "skipped 1 wrong_type" in caplog.text


def test_too_much_text_is_refused_with_a_way_out(tmp_path, raw):
    (tmp_path / "train.txt").write_text("a b\n" * 400_000)
    with pytest.raises(UserError, match=r"train.txt: more than 1 MB of text, .* run ftk-preprocess, or raise `raw_l"):
        raw(tmp_path, raw_limit=1).documents("train")[0]
    assert len(raw(tmp_path, raw_limit=2).documents("train")) == 400_000


def test_no_text_is_refused(tmp_path, raw):
    with pytest.raises(UserError, match=r"holds no text: neither SPLIT.txt"):
        raw(tmp_path)
    (tmp_path / "train.txt").write_text("\n \n")
    with pytest.raises(UserError, match="no documents for train"):
        raw(tmp_path).documents("train")
    (tmp_path / "train.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"train.jsonl, train.txt are all train"):
        raw(tmp_path)


def test_options_are_checked():
    config = RawCorpusConfig(data="d", tokenizer_folder="t", text_key="")
    assert mistakes(config) == ["text_key is empty; it must name a field"]


def test_json_lines_survive(tmp_path, raw):
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "a\nb"}) + "\n")
    assert rows(raw(tmp_path).documents("train")) == [[4, 5]]
