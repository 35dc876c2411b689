"""Rows in Python as documents: those of the library `datasets`, and mappings of any other source."""

from __future__ import annotations

import json

import pytest
from preprocessing import run, sentences

import ftk.data
from ftk.data.corpora.indexed_corpus import IndexedCorpus, IndexedCorpusConfig
from ftk.errors import UserError
from ftk.tasks.causal_lm.task import CausalLMConfig, CausalLMTask
from ftk.tokenizers import load_tokenizer

LINES = sentences(2300)


class Dataset:
    """What of `datasets.Dataset` is used: other columns are not made, and no tensors."""

    def __init__(self, columns, chosen=None, plain=False):
        self.columns, self.chosen, self.plain = columns, chosen or list(columns), plain
        self.column_names = list(columns)

    def with_format(self, kind):
        assert kind is None
        return Dataset(self.columns, self.chosen, plain=True)

    def select_columns(self, names):
        return Dataset(self.columns, names, self.plain)

    def iter(self, batch_size):
        assert (self.plain, self.chosen) == (True, ["body"])
        for first in range(0, len(self.columns["body"]), batch_size):
            yield {name: self.columns[name][first : first + batch_size] for name in self.chosen}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """The same documents by ftk-preprocess."""
    place = tmp_path_factory.mktemp("rows")
    (place / "train.txt").write_text("".join(f"{line}\n" for line in LINES))
    arguments = ("--destdir", place / "data-bin", "--tokenizer-path", model)
    assert run("--trainpref", place / "train.txt", *arguments) == 0
    return place / "data-bin"


def tokens(corpus, split="train"):
    documents = corpus.documents(split)
    return [documents[number].tolist() for number in range(len(documents))]


ROWS = [{"id": number, "body": line} for number, line in enumerate(LINES)]


@pytest.mark.parametrize("rows", [Dataset({"id": [0] * len(LINES), "body": LINES}), ROWS], ids=["dataset", "list"])
@pytest.mark.parametrize("destdir", [None, "out"])
def test_rows_become_the_documents_that_ftk_preprocess_makes_of_the_text(tmp_path, folder, rows, destdir):
    destdir = None if destdir is None else tmp_path / destdir
    corpus = ftk.data.from_dataset({"train": rows, "valid": ROWS[:3]}, folder, column="body", destdir=destdir)
    assert list(corpus.splits()) == ["train", "valid"]
    if destdir is not None:
        assert isinstance(corpus, IndexedCorpus)
        assert (destdir / "train.bin").read_bytes() == (folder / "train.bin").read_bytes()
        record = json.loads((destdir / "preprocess.json").read_text())
        assert record["splits"]["valid"]["documents"] == 3
    assert tokens(corpus) == tokens(IndexedCorpus(IndexedCorpusConfig(data=str(folder))))
    assert len(tokens(corpus, "valid")) == 3
    task = CausalLMTask(CausalLMConfig(seq_length=32), corpus=corpus, seed=1)
    assert task.load_split("train").sample(1, 0)["tokens"].shape == (32,)
    assert load_tokenizer(task.tokenizer_folder).fingerprint == task.tokenizer.fingerprint
    with pytest.raises(UserError, match="has no split 'test'; there are: train, valid"):
        corpus.documents("test")


def test_rows_without_text_are_skipped_if_wanted(folder):
    corpus = ftk.data.from_dataset([{"text": None}, {"text": "a cat"}, {"text": "\ud800"}], folder, on_error="skip")
    assert [corpus.tokenizer().decode(one) for one in tokens(corpus)] == ["a cat"]


def test_another_word_for_what_to_do_about_errors_is_refused(folder):
    with pytest.raises(UserError, match="on_error is 'ignroe'; it must be 'raise' or 'skip'"):
        ftk.data.from_dataset([{"text": "a"}], folder, on_error="ignroe")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({}, "dataset is an empty mapping; give rows by the name of their split"),
        ([{"text": "a"}, {"text": None}], 'train: row 2: the column "text" is null; fill it'),
        ([{"text": 3}], 'train: row 1: "text" holds a value of type int, not text; choose another column'),
        ([{"body": "a"}], 'train: row 1: no column "text" (columns: body); choose one: column='),
        (Dataset({"body": ["a"]}), 'train: no column "text" (columns: body); choose one: column='),
        (["a"], "train: row 1 is of type str; rows must be mappings, as {'text': '...'}"),
        ([], "train: no documents in 0 rows of the dataset"),
        ([{"text": " "}], "train: no documents in 1 rows of the dataset"),
        ("org/name", "org/name: a name, not rows; give what datasets.load_dataset('org/name') returns"),
    ],
)
def test_what_is_no_text_is_one_line(tmp_path, folder, rows, message):
    for destdir in (None, tmp_path / "out"):
        with pytest.raises(UserError) as caught:
            ftk.data.from_dataset(rows, folder, destdir=destdir)
        assert str(caught.value).startswith(message)
    assert not (tmp_path / "out").exists()
