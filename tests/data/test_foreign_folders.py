"""Folders that Megatron and fairseq have written are corpora as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftk.data.corpora.indexed_corpus import IndexedCorpusConfig, IndexedFolder
from ftk.data.indexed.dataset import IndexedDatasetWriter
from ftk.data.inspect_data import stats, verify
from ftk.errors import UserError
from ftk.tasks.causal_lm.task import CausalLMConfig, CausalLMTask
from ftk.tasks.translation.task import TranslationConfig, TranslationTask
from ftk.tokenizers import build_tokenizer, load_tokenizer
from tests.data.fairseq_files import write_fairseq


def opened(folder: Path, **options) -> IndexedFolder:
    return IndexedFolder(IndexedCorpusConfig(data=str(folder), **options))


def rows(documents) -> list[list[int]]:
    return [documents[i].tolist() for i in range(len(documents))]


@pytest.fixture
def fairseq(tmp_path) -> Path:
    """A folder as fairseq-preprocess --only-source leaves it."""
    write_fairseq(tmp_path / "fs" / "train", [[4, 5, 2], [6, 3, 2]])
    write_fairseq(tmp_path / "fs" / "valid", [[7, 2]])
    (tmp_path / "fs" / "dict.txt").write_text("".join(f"w{i} {i}\n" for i in range(20)))
    return tmp_path / "fs"


def test_a_fairseq_folder_is_a_corpus(fairseq):
    corpus = opened(fairseq)
    assert corpus.splits() == ["train", "valid"]
    tokenizer = corpus.tokenizer()
    assert tokenizer.decode(corpus.documents("train")[0].tolist()) == "w0 w1 </s>"
    names = sorted(path.name for path in corpus.tokenizer_folder.iterdir())
    assert names == ["dict.txt", "ftk_tokenizer.json"]  # for checkpoints: without the data
    assert load_tokenizer(corpus.tokenizer_folder).fingerprint == tokenizer.fingerprint
    assert "train: 2 documents, 6 tokens (uint16)" in stats(fairseq)
    assert verify(fairseq) == []


def test_fairseqs_text_of_one_language_has_the_plain_name_of_its_split(tmp_path):
    write_fairseq(tmp_path / "fs" / "train.en-None.en", [[4, 2]])
    (tmp_path / "fs" / "dict.en.txt").write_text("house 1\n")
    corpus = opened(tmp_path / "fs")
    assert corpus.splits() == ["train"]
    assert corpus.tokenizer().decode(corpus.documents("train")[0].tolist()) == "house </s>"


def test_texts_of_two_languages_are_splits_that_are_called_as_their_files_are(tmp_path):
    for stem, ids in (("train.de-None.de", [4, 2]), ("train.en-None.en", [5, 2]), ("valid.en-None.en", [6, 2])):
        write_fairseq(tmp_path / stem, [ids])
    corpus = opened(tmp_path)
    assert corpus.splits() == ["train.de-None.de", "train.en-None.en", "valid"]
    assert rows(corpus.documents("train.de-None.de")) == [[4, 2]]
    assert rows(corpus.documents("train.en-None.en")) == [[5, 2]]
    with pytest.raises(UserError, match=r"no split 'train'; there are: train.de-None.de, train.en-None.en, valid"):
        corpus.documents("train")
    write_fairseq(tmp_path / "valid", [[7, 2]])
    assert opened(tmp_path).splits() == ["train.de-None.de", "train.en-None.en", "valid", "valid.en-None.en"]


def test_each_side_of_fairseqs_translations_is_a_split(tmp_path):
    folder = tmp_path / "en-de"
    write_fairseq(folder / "train.en-de.en", [[4, 2], [5, 2]])
    write_fairseq(folder / "train.en-de.de", [[6, 6, 2]])
    (folder / "dict.en.txt").write_text("house 1\ntree 1\n")
    (folder / "dict.de.txt").write_text("Baum 1\nein 1\nHaus 1\n")
    corpus = opened(folder)
    assert corpus.splits() == ["train", "train.en-de.de", "train.en-de.en"]
    with pytest.raises(
        UserError, match=r"train.en-de.en has 2 sequences, .*train.en-de.de 1; they are no translations"
    ):
        corpus.documents("train")
    assert rows(corpus.documents("train.en-de.de")) == [[6, 6, 2]]
    tokenizer = corpus.tokenizer()  # of the targets, with that of the sources
    assert (tokenizer.decode([6]), tokenizer.source.decode([5])) == ("Haus", "tree")
    assert load_tokenizer(corpus.tokenizer_folder).fingerprint == tokenizer.fingerprint != tokenizer.source.fingerprint
    with pytest.raises(UserError, match=r"CausalLMTask reads one vocabulary, but the data has a tokenizer for sources"):
        CausalLMTask(CausalLMConfig(), corpus=corpus, seed=1)
    build_tokenizer("fairseq_dict", path=folder / "dict.de.txt").save(tmp_path / "de")
    assert opened(folder, tokenizer_folder=str(tmp_path / "de")).tokenizer().decode([6]) == "Haus"


def test_both_sides_of_fairseqs_translations_are_pairs(tmp_path):
    """Whose dictionary is one for both languages, as of fairseq-preprocess --joined-dictionary."""
    folder = tmp_path / "en-de"
    write_fairseq(folder / "train.en-de.en", [[4, 2], [5, 4, 2]])
    write_fairseq(folder / "train.en-de.de", [[6, 6, 2], [7, 2]])
    for language in ("en", "de"):
        (folder / f"dict.{language}.txt").write_text("house 1\ntree 1\nHaus 1\nBaum 1\n")
    corpus = opened(folder)
    assert rows(corpus.documents("train")) == [[4, 2, 6, 6, 2], [5, 4, 2, 7, 2]]
    task = TranslationTask(TranslationConfig(), corpus=corpus, seed=1)
    sample = task.load_split("train").sample(1, 1)
    assert (sample["tokens"].tolist(), sample["targets"].tolist()) == ([5, 4, 2], [7, 2])
    assert sample["decoder_tokens"].tolist() == [2, 7]
    assert task.tokenizer.decode(sample["targets"].tolist()) == "Baum </s>"
    (folder / "dict.en.txt").write_text("house 1\ntree 1\n")  # a dictionary for each language
    task = TranslationTask(TranslationConfig(), corpus=opened(folder), seed=1)
    sample = task.load_split("train").sample(1, 1)
    assert task.tokenizer.source.decode(sample["tokens"].tolist()) == "tree house </s>"
    assert task.tokenizer.decode(sample["targets"].tolist()) == "Baum </s>"
    (folder / "dict.en.txt").write_text("house 1\n")
    with pytest.raises(UserError, match=r"document 1 holds token 5, outside the vocabulary of 5"):
        TranslationTask(TranslationConfig(), corpus=opened(folder), seed=1).load_split("train").sample(1, 1)


def test_two_translations_of_a_split_are_refused(tmp_path):
    for stem in ("train.en-de.en", "train.en-de.de", "train.en-fr.en", "train.en-fr.fr"):
        write_fairseq(tmp_path / stem, [[4, 2]])
    with pytest.raises(UserError, match=r"train.en-de.en and train.en-fr.en are both the split train; keep"):
        opened(tmp_path)


def test_a_megatron_folder_needs_a_tokenizer_from_elsewhere(fairseq, tmp_path):
    opened(fairseq).tokenizer().save(tmp_path / "words")
    (tmp_path / "m").mkdir()
    with IndexedDatasetWriter(tmp_path / "m" / "wiki_text_document", "uint16") as writer:
        writer.add([4, 5])
    with pytest.raises(UserError, match=r"holds no tokenizer .* by `tokenizer_folder`"):
        opened(tmp_path / "m").tokenizer()
    corpus = opened(tmp_path / "m", tokenizer_folder=str(tmp_path / "words"))
    assert corpus.splits() == ["wiki_text_document"]
    assert corpus.tokenizer().decode(corpus.documents("wiki_text_document")[0].tolist()) == "w0 w1"
    assert corpus.tokenizer_folder == tmp_path / "words"


def test_megatrons_documents_of_several_sequences_are_read_as_one(tmp_path):
    with IndexedDatasetWriter(tmp_path / "train", "int32") as writer:
        writer.add([1, 2], end_document=False)
        writer.add([3])
        writer.end_document()  # a document without sequences
        writer.add([4])
    documents = opened(tmp_path).documents("train")
    assert rows(documents) == [[1, 2, 3], [], [4]]
    assert documents.sizes.tolist() == [3, 0, 1]
    assert documents.tokens.tolist() == [1, 2, 3, 4]
    with pytest.raises(IndexError):
        documents[3]
