"""Samples of translation are the pairs of the data, as they are, cut or left out."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from ftk.data.corpora.documents import DocumentList, TokenizedDocuments
from ftk.data.corpora.split import DocumentSubset
from ftk.errors import UserError
from ftk.tasks.translation.samples import TranslationDataset
from ftk.tasks.translation.task import TranslationConfig

END, START, PAD, VOCAB_SIZE = 50, 51, 52, 60
RANDOM = np.random.default_rng(1)
PAIRS = [tuple(RANDOM.integers(0, 50, size).tolist() for size in sizes) for sizes in RANDOM.integers(1, 20, (40, 2))]
DOCUMENTS = [[*source, END, *target, END] for source, target in PAIRS]


def dataset(documents: object = None, prefixes: tuple = ((), ()), **options: object) -> TranslationDataset:
    config = TranslationConfig(**options)  # type: ignore[arg-type]
    found = DocumentList(DOCUMENTS) if documents is None else documents
    return TranslationDataset(found, (VOCAB_SIZE,) * 2, START, (END, END), PAD, prefixes, config)  # type: ignore[arg-type]


def in_one_array() -> TokenizedDocuments:
    sizes = np.array([*map(len, DOCUMENTS)], dtype=np.int32)
    return TokenizedDocuments(np.concatenate([np.array(each, dtype=np.uint16) for each in DOCUMENTS]), sizes)


@pytest.mark.parametrize("documents", [None, in_one_array(), DocumentSubset(in_one_array(), np.arange(40))])
def test_samples_are_the_pairs(documents) -> None:
    data = pickle.loads(pickle.dumps(dataset(documents, ([7, 8], [9]))))
    assert len(data) == 40
    assert len(data.samples(1, np.arange(0))) == 0
    many = data.samples(1, np.arange(40))
    for index, (source, target) in enumerate(PAIRS):
        sample = many[index]
        assert sample["tokens"].tolist() == [7, 8, *source, END]
        assert sample["targets"].tolist() == [9, *target, END]
        assert sample["decoder_tokens"].tolist() == [START, 9, *target]
        assert sample["lengths"] == len(source) + 3
        assert data.sizes(1)[index] == max(len(source) + 3, len(target) + 2)
        assert all(np.array_equal(value, data.sample(5, index)[name]) for name, value in sample.items())
    for array, lengths in (("tokens", many.lengths), ("targets", many.own_lengths["targets"])):
        padding = np.arange(many.arrays[array].shape[1]) >= lengths[:, None]
        assert (many.arrays[array][padding] == PAD).all()


@pytest.mark.parametrize("long_pairs", ["drop", "cut"])
def test_long_pairs_are_left_out_or_cut_and_counted(caplog, long_pairs) -> None:
    caplog.set_level("INFO")
    data = dataset(seq_length=11, long_pairs=long_pairs)
    fits = [max(map(len, pair)) < 11 for pair in PAIRS]
    assert f"{40 - sum(fits)} of 40 pairs" in caplog.text
    assert data.sizes(1).max() == 11
    kept = [pair for pair, is_short in zip(PAIRS, fits, strict=True) if is_short or long_pairs == "cut"]
    assert len(data) == len(kept)
    for index, (source, target) in enumerate(kept):
        sample = data.sample(1, index)
        assert sample["tokens"].tolist() == [*source[:10], END]
        assert sample["targets"].tolist() == [*target[:10], END]


def test_a_prefix_longer_than_the_room_is_cut() -> None:
    sample = dataset(prefixes=([7] * 30, ()), seq_length=5, long_pairs="cut").sample(1, 0)
    assert sample["tokens"].tolist() == [7, 7, 7, 7, END]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([*DOCUMENTS, [1, 2, 3]], "document 40 is not a pair of texts; preprocess pairs with"),
        ([*DOCUMENTS, [1, 2, END]], "document 40 is not a pair"),
        ([*DOCUMENTS, [1, END, 3, 4]], "document 40 is not a pair"),
        ([*DOCUMENTS, []], "document 40 is not a pair"),
        ([[]], "no pairs"),
    ],
)
def test_documents_that_are_no_pairs_are_refused(documents, message) -> None:
    with pytest.raises(UserError, match=message):
        dataset(DocumentList(documents))


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    data = dataset(DocumentList([*DOCUMENTS, [1, END, VOCAB_SIZE, END]]))
    with pytest.raises(UserError, match="document 40 holds token 60, outside the vocabulary"):
        data.sample(1, 40)
    with pytest.raises(UserError, match="leaves nothing"):
        dataset(seq_length=2)


def test_sides_have_ends_and_ids_of_their_own() -> None:
    """40 is an end of sources and a word of targets, and the other way round with 50."""
    pairs = [([50, 3], [40, 41]), ([1], [2, 40])]
    documents = DocumentList([[*source, 40, *target, 50] for source, target in pairs])
    data = TranslationDataset(documents, (51, 60), START, (40, 50), PAD, ((7,), (8, 9)), TranslationConfig())
    data = pickle.loads(pickle.dumps(data))
    for index, (source, target) in enumerate(pairs):
        sample = data.sample(1, index)
        assert sample["tokens"].tolist() == [7, *source, 40]
        assert sample["targets"].tolist() == [8, 9, *target, 50]
    for wrong in ([51, 40, 1, 50], [1, 40, 60, 50]):
        data = TranslationDataset(DocumentList([wrong]), (51, 60), START, (40, 50), PAD, ((), ()), TranslationConfig())
        outside = 51 if wrong[0] == 51 else 60
        with pytest.raises(UserError, match=f"document 0 holds token {outside}, outside the vocabulary of {outside};"):
            data.sample(1, 0)
