"""The raw dataset: text files are tokenised when they are opened; pairs belong together line by line."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from ftk.data.corpora.raw_corpus import RawCorpus, RawCorpusConfig
from ftk.errors import UserError
from ftk.tokenizers import build_tokenizer

SHARED = Path("/work/shared/data")
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not on this machine")


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
        assert list(config.validate()) == []
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
    assert not corpus.has_targets("train")
    with pytest.raises(UserError, match="train has no targets"):
        corpus.targets("train")
    with pytest.raises(UserError, match="has no split 'dev'; there are: test, train, valid"):
        corpus.documents("dev")
    with pytest.raises(IndexError, match="document 2 of 2"):
        corpus.documents("train")[2]


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
    with pytest.raises(UserError, match=r"train.txt: more than 1 MB of text, .* run ftk-preprocess, or raise --raw-l"):
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


# --- pairs ---


def pair(folder: Path, source: str, target: str, split: str = "train") -> Path:
    (folder / f"{split}.source").write_text(source)
    (folder / f"{split}.target").write_text(target)
    return folder


def test_pairs_belong_together_line_by_line(tmp_path, raw):
    corpus = raw(pair(tmp_path, "a b\nc\n", "c\na a a\n"))
    assert corpus.has_targets("train")
    assert rows(corpus.documents("train")) == [[4, 5], [6]]
    assert rows(corpus.targets("train")) == [[6], [4, 4, 4]]
    assert corpus.target_tokenizer() is corpus.tokenizer()
    assert rows(raw(tmp_path / "train.source").targets("train")) == [[6], [4, 4, 4]]


def test_other_endings_and_compressed_pairs(tmp_path, raw):
    (tmp_path / "train.en.gz").write_bytes(gzip.compress(b"a\n"))
    (tmp_path / "train.de").write_text("b\n")
    corpus = raw(tmp_path, source_lang="en", target_lang="de")
    assert (rows(corpus.documents("train")), rows(corpus.targets("train"))) == ([[4]], [[5]])


def test_a_missing_side_is_named(tmp_path, raw):
    (tmp_path / "train.source").write_text("a\n")
    with pytest.raises(UserError, match=r"train.source: its partner .*train.target is missing"):
        raw(tmp_path)
    with pytest.raises(UserError, match=r"train.source: its partner .*train.target is missing"):
        raw(tmp_path / "train.source")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_different_numbers_of_lines_are_refused_whatever_on_error_says(tmp_path, raw, on_error):
    corpus = raw(pair(tmp_path, "a\nb\nc\n", "a\nb\n"), on_error=on_error)
    with pytest.raises(UserError, match=r"train.source has 3 lines, .*train.target has 2; line i of one belongs to"):
        corpus.documents("train")


@pytest.mark.parametrize("side", ["source", "target"])
def test_an_empty_side_is_refused_or_skipped_with_its_partner(tmp_path, raw, side, caplog):
    texts = {"source": "a\nb\nc\n", "target": "c\nb\na\n"}
    texts[side] = texts[side].replace("b", " ")
    pair(tmp_path, **texts)
    with pytest.raises(UserError, match=rf"train.{side}:2: an empty line .* line 2 out of both"):
        raw(tmp_path).documents("train")
    with caplog.at_level(logging.WARNING):
        corpus = raw(tmp_path, on_error="skip")
        assert (rows(corpus.documents("train")), rows(corpus.targets("train"))) == ([[4], [6]], [[6], [4]])
    assert "skipped 1 empty" in caplog.text


def test_bad_bytes_in_a_pair(tmp_path, raw):
    pair(tmp_path, "a\nb\n", "b\n")
    (tmp_path / "train.target").write_bytes(b"b\n\xff\n")
    with pytest.raises(UserError, match=r"train.target:2: .*invalid UTF-8"):
        raw(tmp_path).documents("train")
    assert rows(raw(tmp_path, on_error="skip").targets("train")) == [[5]]
    (tmp_path / "train.target").write_bytes(b"\x1f\x8b\x08rest")
    with pytest.raises(UserError, match="gzip data"):
        raw(tmp_path, on_error="skip").documents("train")


@needs_shared
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("60_count_mismatch", r"60_count_mismatch.source has 5 lines, .*60_count_mismatch.target has 4"),
        ("61_empty_target", r"61_empty_target.target:2: an empty line"),
    ],
)
def test_hostile_pairs(raw, name, message):
    with pytest.raises(UserError, match=message):
        raw(SHARED / "hostile" / f"{name}.source").documents("train")


@needs_shared
@pytest.mark.parametrize(
    ("name", "tokenizer", "counts"),
    [
        ("scitldr_a", ("gpt2_bpe", "gpt2-vocab.json"), {"train": 1992, "valid": 619, "test": 618}),
        ("cmrc2018_trial", ("sentencepiece", "cog-pretrain.model"), {"train": 822, "valid": 94, "test": 86}),
    ],
)
def test_real_pairs(tmp_path, name, tokenizer, counts):
    made = build_tokenizer(tokenizer[0], path=SHARED / "tokenizers" / tokenizer[1])
    made.save(tmp_path / "tokenizer")
    data = SHARED / "seq2seq" / name
    corpus = RawCorpus(RawCorpusConfig(data=str(data), tokenizer_folder=str(tmp_path / "tokenizer")))
    assert corpus.splits() == sorted(counts)
    for split, count in counts.items():
        sources, targets = corpus.documents(split), corpus.targets(split)
        assert len(sources) == len(targets) == count
        for side, documents in (("source", sources), ("target", targets)):
            lines = (data / f"{split}.{side}").read_text(encoding="utf-8").split("\n")
            for index in (0, count // 2, count - 1):
                assert documents[index].tolist() == made.encode(lines[index])


def test_options_are_checked():
    config = RawCorpusConfig(data="d", tokenizer_folder="t", raw_limit=0, text_key="", source_lang="x", target_lang="x")
    assert len(list(config.validate())) == 3


def test_json_lines_survive(tmp_path, raw):
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "a\nb"}) + "\n")
    assert rows(raw(tmp_path).documents("train")) == [[4, 5]]
