"""ftk-data convert: between ftk's, Megatron's and fairseq's files, JSONL and text, nothing is lost on the way."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.data.corpora.corpus import IndexedCorpusConfig, IndexedFolder
from ftk.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from ftk.data.inspect_data import stats, verify
from ftk.errors import UserError
from ftk.tokenizers import build_tokenizer, load_tokenizer
from ftk_cli import data as command

SHARED = Path("/work/shared/data")
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not on this machine")
MEGATRON = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]
FAIRSEQ = ["uint8", "int8", "int16", "int32", "int64", "float64", "uint16", "uint32", "uint64"]
ROWS = [[3, 1, 2], [], [9], [4, 4, 4, 4, 4]]


def run(*arguments) -> int:
    return command.main(["convert", *map(str, arguments)])


def failed(capsys, *arguments) -> str:
    assert run(*arguments) == 2
    return capsys.readouterr().err


def write(prefix: Path, rows, dtype: str, dialect: str = "megatron", **options) -> IndexedDataset:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedDatasetWriter(prefix, dtype, dialect=dialect, **options) as writer:
        for row in rows:
            writer.add(np.array(row, dtype=dtype))
    return IndexedDataset(prefix)


def rows_of(prefix: Path) -> list[list]:
    return [row.tolist() for row in IndexedDataset(prefix)]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    """A tokenizer folder: fairseq_dict with words w0 to w19, ids 4 to 23."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "dict.txt").write_text("".join(f"w{i} {i}\n" for i in range(20)))
    build_tokenizer("fairseq_dict", path=folder / "dict.txt").save(folder / "tokenizer")
    return folder / "tokenizer"


@pytest.fixture
def fairseq(tmp_path) -> Path:
    """A folder as fairseq-preprocess --only-source leaves it."""
    write(tmp_path / "fs" / "train", [[4, 5, 2], [6, 3, 2]], "uint16", "fairseq")
    write(tmp_path / "fs" / "valid", [[7, 2]], "uint16", "fairseq")
    (tmp_path / "fs" / "dict.txt").write_text("".join(f"w{i} {i}\n" for i in range(20)))
    return tmp_path / "fs"


# --- ids ---


@pytest.mark.parametrize("dtype", MEGATRON)
def test_every_dtype_goes_to_megatron_and_back(tmp_path, dtype):
    write(tmp_path / "a" / "train", ROWS, dtype)
    assert run(tmp_path / "a", tmp_path / "b", "--to", "megatron") == 0
    for suffix in ("bin", "idx"):
        assert (tmp_path / "b" / f"train.{suffix}").read_bytes() == (tmp_path / "a" / f"train.{suffix}").read_bytes()
    assert verify(tmp_path / "b") == []


@pytest.mark.parametrize("dtype", FAIRSEQ)
def test_every_dtype_of_fairseq_goes_to_megatron_and_back(tmp_path, dtype):
    write(tmp_path / "a" / "train", ROWS, dtype, "fairseq")
    assert IndexedDataset(tmp_path / "a" / "train").dialect == "fairseq"
    assert run(tmp_path / "a", tmp_path / "b", "--to", "megatron") == 0
    assert run(tmp_path / "b", tmp_path / "c", "--to", "fairseq", "--keep-ids") == 0
    for folder in ("b", "c"):
        assert rows_of(tmp_path / folder / "train") == [np.array(row, dtype=dtype).tolist() for row in ROWS]
    if dtype in MEGATRON:
        for suffix in ("bin", "idx"):
            assert (tmp_path / "c" / f"train.{suffix}").read_bytes() == (
                tmp_path / "a" / f"train.{suffix}"
            ).read_bytes()
    else:
        assert IndexedDataset(tmp_path / "b" / "train").dtype == np.int32  # Megatron has no such dtype; the ids fit


@pytest.mark.parametrize(
    ("dtype", "greatest", "expected"), [("uint32", 2**32 - 1, "int64"), ("uint64", 2**40, "int64")]
)
def test_great_unsigned_ids_get_a_wider_dtype(tmp_path, dtype, greatest, expected):
    write(tmp_path / "a" / "train", [[1, greatest]], dtype, "fairseq")
    assert run(tmp_path / "a", tmp_path / "b", "--to", "megatron") == 0
    assert IndexedDataset(tmp_path / "b" / "train").dtype == np.dtype(expected)
    assert rows_of(tmp_path / "b" / "train") == [[1, greatest]]


def test_what_no_dtype_holds_is_refused(tmp_path, capsys):
    write(tmp_path / "a" / "train", [[1, 2**63]], "uint64", "fairseq")
    assert "do not all fit int64" in failed(capsys, tmp_path / "a", tmp_path / "b", "--to", "megatron")
    write(tmp_path / "c" / "train", [[1.5]], "float32")
    message = failed(capsys, tmp_path / "c", tmp_path / "b", "--to", "fairseq", "--keep-ids")
    assert "fairseq's indexed dataset cannot hold float32; choose one of uint8" in message
    assert not (tmp_path / "b").exists()


def test_documents_of_several_sequences_stay_together(tmp_path):
    (tmp_path / "a").mkdir()
    with IndexedDatasetWriter(tmp_path / "a" / "train", "int32") as writer:
        writer.add([1, 2], end_document=False)
        writer.add([3])
        writer.end_document()  # a document without sequences
        writer.add([4])
    assert run(tmp_path / "a", tmp_path / "b", "--to", "megatron") == 0
    assert IndexedDataset(tmp_path / "b" / "train").document_index.tolist() == [0, 2, 2, 3]
    documents = IndexedFolder(IndexedCorpusConfig(data=str(tmp_path / "b"))).documents("train")
    assert [documents[i].tolist() for i in range(len(documents))] == [[1, 2, 3], [], [4]]
    assert documents.sizes.tolist() == [3, 0, 1]
    assert documents.tokens.tolist() == [1, 2, 3, 4]
    with pytest.raises(IndexError):
        documents[3]


@pytest.mark.parametrize("limit", [1 << 31, 1 << 32])
@pytest.mark.parametrize("to", ["megatron", "fairseq"])
def test_offsets_beyond_32_bits_are_converted_and_holes_stay_holes(tmp_path, limit, to):
    half = limit // 4
    sizes = [half, half, 3, 2]
    pointers = [0, 2 * half, 4 * half, 4 * half + 6]
    (tmp_path / "a").mkdir()
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 5) + struct.pack("<4i", *sizes)
    (tmp_path / "a" / "d.idx").write_bytes(index + struct.pack("<4q", *pointers) + struct.pack("<5q", *range(5)))
    with open(tmp_path / "a" / "d.bin", "wb") as file:
        file.seek(pointers[2])
        file.write(np.array([7, 8, 9, 10, 11], dtype="<u2").tobytes())
    if os.stat(tmp_path / "a" / "d.bin").st_blocks * 512 > 1 << 24:
        pytest.skip("this file system has no sparse files")
    options = ["--keep-ids"] if to == "fairseq" else []
    assert run(tmp_path / "a", tmp_path / "b", "--to", to, *options) == 0
    assert os.stat(tmp_path / "b" / "d.bin").st_blocks * 512 < 1 << 24
    dataset = IndexedDataset(tmp_path / "b" / "d")
    assert dataset.dialect == to
    assert dataset.sizes.tolist() == sizes
    assert dataset[2].tolist() == [7, 8, 9]
    assert dataset[3].tolist() == [10, 11]
    assert dataset.get(1, half - 1).tolist() == [0]
    assert dataset.gather([3, 2], pad=1).tolist() == [[10, 11, 1], [7, 8, 9]]


# --- fairseq ---


def test_a_fairseq_folder_is_a_corpus(fairseq):
    corpus = IndexedFolder(IndexedCorpusConfig(data=str(fairseq)))
    assert corpus.splits() == ["train", "valid"]
    tokenizer = corpus.tokenizer()
    assert tokenizer.decode(corpus.documents("train")[0].tolist()) == "w0 w1 </s>"
    assert not corpus.has_targets("train")
    names = sorted(path.name for path in corpus.tokenizer_folder.iterdir())
    assert names == ["dict.txt", "ftk_tokenizer.json"]  # for checkpoints: without the data
    assert load_tokenizer(corpus.tokenizer_folder).fingerprint == tokenizer.fingerprint
    assert "train: 2 documents, 6 tokens (uint16)" in stats(fairseq)
    assert verify(fairseq) == []


def test_fairseq_to_ftk_and_back_is_the_same_data(fairseq, tmp_path):
    assert run(fairseq, tmp_path / "ftk", "--to", "ftk") == 0
    assert verify(tmp_path / "ftk") == []
    assert rows_of(tmp_path / "ftk" / "train") == [[4, 5, 2], [6, 3, 2]]
    assert load_tokenizer(tmp_path / "ftk").name == "fairseq_dict"
    assert run(tmp_path / "ftk", tmp_path / "back", "--to", "fairseq") == 0
    for name in ("train.bin", "train.idx", "valid.bin", "valid.idx", "dict.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (fairseq / name).read_bytes()
    (tmp_path / "ftk" / "train.bin").write_bytes(bytes(12))
    assert any("its sha256 is not" in problem for problem in verify(tmp_path / "ftk"))


def test_fairseq_to_text_and_back(fairseq, tmp_path, capsys):
    assert run(fairseq, tmp_path / "text", "--to", "text") == 0
    assert (tmp_path / "text" / "train.txt").read_text() == "w0 w1\nw2 <unk>\n"
    assert verify(tmp_path / "text") == []
    assert "gives" not in capsys.readouterr().out
    assert run(fairseq, tmp_path / "ftk", "--to", "ftk") == 0
    assert run(tmp_path / "text", tmp_path / "again", "--to", "fairseq", "--tokenizer-folder", tmp_path / "ftk") == 0
    assert rows_of(tmp_path / "again" / "train") == rows_of(fairseq / "train")


def test_pieces_are_put_together(tmp_path):
    write(tmp_path / "fs" / "train", [[4, 5, 2]], "uint16", "fairseq")
    (tmp_path / "fs" / "dict.txt").write_text("lo@@ 1\nwer 1\n")
    assert run(tmp_path / "fs", tmp_path / "text", "--to", "text", "--remove-bpe", "subword_nmt") == 0
    assert (tmp_path / "text" / "train.txt").read_text() == "lower\n"


@pytest.fixture
def translation(tmp_path) -> Path:
    """A folder as fairseq-preprocess -s en -t de leaves it."""
    folder = tmp_path / "en-de"
    write(folder / "train.en-de.en", [[4, 2], [5, 2]], "uint16", "fairseq")
    write(folder / "train.en-de.de", [[6, 6, 2], [4, 2]], "uint16", "fairseq")
    (folder / "dict.en.txt").write_text("house 1\ntree 1\n")
    (folder / "dict.de.txt").write_text("Baum 1\nein 1\nHaus 1\n")
    return folder


def test_fairseqs_language_pairs_are_sources_and_targets(translation):
    corpus = IndexedFolder(IndexedCorpusConfig(data=str(translation)))
    assert corpus.splits() == ["train"]
    assert corpus.has_targets("train")
    assert corpus.tokenizer().decode(corpus.documents("train")[0].tolist()) == "house </s>"
    assert corpus.target_tokenizer().decode(corpus.targets("train")[0].tolist()) == "Haus Haus </s>"
    turned = IndexedFolder(IndexedCorpusConfig(data=str(translation), source_lang="de"))
    assert turned.tokenizer().decode(turned.documents("train")[1].tolist()) == "Baum </s>"
    with pytest.raises(UserError, match=r"holds no language fr; there are: de, en"):
        IndexedFolder(IndexedCorpusConfig(data=str(translation), source_lang="fr"))
    write(translation / "train.en-fr.en", [[4]], "uint16", "fairseq")
    write(translation / "train.en-fr.fr", [[4]], "uint16", "fairseq")
    with pytest.raises(UserError, match=r"several language pairs for train; choose one by --source-lang"):
        IndexedFolder(IndexedCorpusConfig(data=str(translation), source_lang="en"))
    (translation / "train.en-fr.fr.idx").unlink()
    with pytest.raises(UserError, match=r"the other side \(fr\) is missing"):
        IndexedFolder(IndexedCorpusConfig(data=str(translation), source_lang="fr"))


def test_language_pairs_become_text_but_not_one_vocabulary(translation, tmp_path, capsys):
    assert run(translation, tmp_path / "text", "--to", "text") == 0
    assert (tmp_path / "text" / "train.en").read_text() == "house\ntree\n"
    assert (tmp_path / "text" / "train.de").read_text() == "Haus Haus\nBaum\n"
    assert "have dictionaries of their own" in failed(capsys, translation, tmp_path / "ftk", "--to", "ftk")
    assert "become --to text" in failed(capsys, translation, tmp_path / "j", "--to", "jsonl")
    assert run(translation, tmp_path / "again", "--to", "fairseq") == 0
    for file in translation.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    (tmp_path / "words").mkdir()
    assert run(translation, tmp_path / "m", "--to", "megatron") == 0
    assert sorted(path.name for path in (tmp_path / "m").glob("*.idx")) == ["train.source.idx", "train.target.idx"]


def test_pairs_of_different_numbers_are_refused(translation, capsys, tmp_path):
    write(translation / "train.en-de.de", [[6, 2]], "uint16", "fairseq", overwrite=True)
    with pytest.raises(UserError, match=r"train.en-de.en holds 2 documents, train.en-de.de 1"):
        IndexedFolder(IndexedCorpusConfig(data=str(translation))).targets("train")
    assert "each needs its partner" in failed(capsys, translation, tmp_path / "x", "--to", "text")


def test_raw_pairs_become_ftk_and_come_back(tmp_path, words):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train.source").write_text("w1 w2\nw3\n")
    (tmp_path / "raw" / "train.target").write_text("w4\nw5 w6\n")
    assert run(tmp_path / "raw", tmp_path / "ftk", "--to", "ftk", "--tokenizer-folder", words) == 0
    assert verify(tmp_path / "ftk") == []
    corpus = IndexedFolder(IndexedCorpusConfig(data=str(tmp_path / "ftk")))
    assert corpus.splits() == ["train"]
    assert [row.tolist() for row in corpus.targets("train")] == [[8], [9, 10]]
    assert corpus.target_tokenizer().fingerprint == corpus.tokenizer().fingerprint
    assert run(tmp_path / "ftk", tmp_path / "again", "--to", "text") == 0
    for side in ("source", "target"):
        again = tmp_path / "again" / f"train.{side}"
        assert again.read_text() == (tmp_path / "raw" / f"train.{side}").read_text()


# --- Megatron ---


def test_a_megatron_folder_needs_a_tokenizer_from_elsewhere(tmp_path, words, capsys):
    write(tmp_path / "m" / "wiki_text_document", [[4, 5], [6]], "uint16")
    with pytest.raises(UserError, match=r"holds no tokenizer .* by --tokenizer-folder"):
        IndexedFolder(IndexedCorpusConfig(data=str(tmp_path / "m"))).tokenizer()
    corpus = IndexedFolder(IndexedCorpusConfig(data=str(tmp_path / "m"), tokenizer_folder=str(words)))
    assert corpus.splits() == ["wiki_text_document"]
    assert corpus.tokenizer().decode(corpus.documents("wiki_text_document")[0].tolist()) == "w0 w1"
    assert corpus.tokenizer_folder == words
    for to in ("ftk", "jsonl", "fairseq"):
        assert "by --tokenizer-folder" in failed(capsys, tmp_path / "m", tmp_path / to, "--to", to)
        assert not (tmp_path / to).exists()
        assert run(tmp_path / "m", tmp_path / to, "--to", to, "--tokenizer-folder", words) == 0
    assert verify(tmp_path / "ftk") == []
    (tmp_path / "m" / "wiki_text_document.bin").write_bytes(struct.pack("<3H", 4, 500, 6))
    message = failed(capsys, tmp_path / "m", tmp_path / "x", "--to", "ftk", "--tokenizer-folder", words)
    assert "holds token 500, outside the vocabulary" in message


# --- other tokenizers ---


@needs_shared
@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("gpt2_bpe", "gpt2-vocab.json", "Hello, world! 你好\nA second line"),
        ("sentencepiece", "cog-pretrain.model", "今天天气很好。"),
        ("bert_wordpiece", "bert-base-uncased-vocab.txt", "the cat sat on the mat"),
    ],
)
def test_real_tokenizers_to_every_form_and_back(tmp_path, name, file, text, capsys):
    tokenizer = build_tokenizer(name, path=SHARED / "tokenizers" / file)
    tokenizer.save(tmp_path / "tokenizer")
    texts = [text, f"{text} {text}", "42"]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = ["--tokenizer-folder", tmp_path / "tokenizer"]
    assert run(tmp_path / "raw", tmp_path / "ftk", "--to", "ftk", *given) == 0
    assert verify(tmp_path / "ftk") == []
    ids = [tokenizer.encode(text) for text in texts]
    assert rows_of(tmp_path / "ftk" / "train") == ids
    assert run(tmp_path / "ftk", tmp_path / "json", "--to", "jsonl") == 0
    lines = (tmp_path / "json" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"text": tokenizer.decode(row)} for row in ids]
    assert run(tmp_path / "json", tmp_path / "again", "--to", "ftk", *given) == 0
    assert rows_of(tmp_path / "again" / "train") == ids
    assert "does not give the same ids" not in capsys.readouterr().out
    assert run(tmp_path / "ftk", tmp_path / "fs", "--to", "fairseq") == 0
    assert rows_of(tmp_path / "fs" / "train") == [[token + 4 for token in row] + [2] for row in ids]
    fairseq_tokenizer = build_tokenizer("fairseq_dict", path=tmp_path / "fs")
    for row, converted in zip(ids, rows_of(tmp_path / "fs" / "train"), strict=True):
        spelt = [fairseq_tokenizer.token_text(token) for token in converted[:-1]]
        assert spelt == [tokenizer.token_text(token) for token in row]
    counts = [int(line.rpartition(" ")[2]) for line in (tmp_path / "fs" / "dict.txt").read_text().split("\n")[:-1]]
    assert len(counts) == tokenizer.vocab_size
    assert sum(counts) == sum(map(len, ids))


def test_text_that_is_no_line_is_refused(tmp_path, capsys):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train.jsonl").write_text('{"text": "fine"}\n{"text": "two\\nlines"}\n')
    message = failed(capsys, tmp_path / "raw", tmp_path / "text", "--to", "text")
    assert "train: document 1 holds a line end, so that it cannot be a line; use --to jsonl" in message
    assert not (tmp_path / "text").exists()


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
@settings(max_examples=50, deadline=None)
def test_text_and_jsonl_turn_into_each_other(tmp_path_factory, texts):
    """A document that the text form cannot hold is refused; all others come back as they were."""
    folder = tmp_path_factory.mktemp("texts")
    kept = [text for text in texts if text.strip()]
    if not kept:
        return
    (folder / "a").mkdir()
    (folder / "a" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert run(folder / "a", folder / "b", "--to", "jsonl") == 0
    lines = (folder / "b" / "train.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line)["text"] for line in lines] == kept
    code = run(folder / "b", folder / "c", "--to", "text")
    unfit = any("\n" in t or t.endswith("\r") for t in kept) or kept[0].startswith("\ufeff")
    assert code == (2 if unfit else 0)
    if code == 0:
        assert run(folder / "c", folder / "d", "--to", "jsonl") == 0
        assert (folder / "d" / "train.jsonl").read_bytes() == (folder / "b" / "train.jsonl").read_bytes()


# --- whole or absent ---


def test_a_destination_that_exists_is_replaced_only_when_asked(fairseq, tmp_path, capsys):
    assert run(fairseq, tmp_path / "out", "--to", "text") == 0
    assert "out: exists already; choose another, or" in failed(capsys, fairseq, tmp_path / "out", "--to", "jsonl")
    assert run(fairseq, tmp_path / "out", "--to", "jsonl", "--overwrite") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "preprocess.json",
        "train.jsonl",
        "valid.jsonl",
    ]
    (tmp_path / "out" / "mine").write_text("x")
    message = failed(capsys, fairseq, tmp_path / "out", "--to", "jsonl", "--overwrite")
    assert "holds what ftk did not write (mine)" in message
    message = failed(capsys, fairseq, fairseq, "--to", "ftk", "--overwrite")
    assert "is what is to be converted; choose another folder" in message


def test_a_damaged_source_leaves_nothing(fairseq, tmp_path, capsys):
    os.truncate(fairseq / "valid.bin", 2)
    assert "valid.bin: 2 bytes, but" in failed(capsys, fairseq, tmp_path / "out", "--to", "megatron")
    assert not (tmp_path / "out").exists()
    assert [path for path in tmp_path.iterdir() if path.name.startswith("out")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "ftk", "--keep-ids"], "--keep-ids is for --to fairseq"),
        (["--to", "parquet"], "must be one of ftk, megatron, fairseq, jsonl, text"),
        ([], "convert.to is missing"),
        (["--to", "ftk", "--source-lang", "fr"], "holds no language fr; its files are of no languages"),
    ],
)
def test_wrong_options(fairseq, tmp_path, capsys, arguments, message):
    assert message in failed(capsys, fairseq, tmp_path / "out", *arguments)


def test_nothing_to_convert(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert "holds no text" in failed(capsys, tmp_path / "empty", tmp_path / "out", "--to", "jsonl")
    assert "absent: no such file" in failed(capsys, tmp_path / "absent", tmp_path / "out", "--to", "jsonl")
    write(tmp_path / "m" / "train", ROWS, "uint16")
    message = failed(capsys, tmp_path / "m", tmp_path / "out", "--to", "text", "--remove-bpe", "sentencepiece")
    assert "--remove-bpe is for data with fairseq's dict.txt" in message
