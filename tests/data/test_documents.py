"""Packing documents: what is drawn, where it is cut, and that nothing is lost or made up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from number_corpus import CHINESE_STOP, CLS, EOS, FIRST_WORD, FULL_STOP, QUESTION, NumberTokenizer, random_documents

from ftk.data.corpora.documents import DocumentList, DocumentPacker, ends_sentence, sentence_end_ids
from ftk.data.random import SampleRandom, hash_uniform

TOKENIZER = NumberTokenizer()
ENDS = sentence_end_ids(TOKENIZER)


def packer(documents, **options):
    return DocumentPacker(documents, TOKENIZER.special, ENDS, **{"seq_length": 64, **options})


def split(text):
    """The documents of a packed text without [CLS], and whether the last is whole."""
    assert text[0] == CLS
    parts, current = [], []
    for token in text.tolist():
        if token == CLS:
            current = []
        elif token == EOS:
            parts.append(current)
            current = None
        else:
            current.append(token)
    return (parts, True) if current is None else ([*parts, current], False)


def find(part, document):
    """Where a part stands in a document, or None."""
    for start in range(len(document) - len(part) + 1):
        if document[start : start + len(part)] == part:
            return start
    return None


@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=8).filter(any),
    st.integers(0, 10**6),
    st.integers(8, 100),
    st.sampled_from([{}, {"one_document": True}, {"short_seq_prob": 1.0}, {"non_sentence_start": 1.0}]),
)
@settings(max_examples=300, deadline=None)
def test_a_packed_text_is_made_of_pieces_of_documents(lengths, seed, seq_length, options):
    corpus = random_documents(lengths, seed)
    originals = [corpus[number].tolist() for number in range(len(corpus))]
    text = packer(corpus, seq_length=seq_length, **options).kernel.pack(SampleRandom(seed, 1, 1))
    assert 0 < len(text) <= seq_length
    parts, last_is_whole = split(text)
    for number, part in enumerate(parts):
        reaches_end = number < len(parts) - 1 or last_is_whole
        found = [(document, find(part, document)) for document in originals if find(part, document) is not None]
        assert found, "a part is in no document"
        if number > 0:
            assert any(document[: len(part)] == part for document, _ in found)
        if reaches_end:
            assert any(document[len(document) - len(part) :] == part for document, _ in found)
    if options.get("one_document"):
        assert len(parts) == 1


def test_texts_are_filled_to_the_sequence_length():
    made = packer(random_documents([10] * 50))
    lengths = [len(made.kernel.pack(SampleRandom(1, 1, index))) for index in range(200)]
    assert max(lengths) == 64
    assert np.mean(lengths) > 58


def test_the_drawn_document_is_the_one_that_holds_the_drawn_token():
    """So documents are drawn in proportion to their length, and empty ones never."""
    sizes = np.array([3, 0, 0, 7, 1, 0, 20, 5])
    made = packer(DocumentList([np.full(size, FIRST_WORD + n) for n, size in enumerate(sizes)]), one_document=True)
    indices = np.arange(500)
    first_sizes = made.first_document_sizes(9, 2, indices)
    for index in indices:
        token = int(hash_uniform(9, 2, np.array([index]))[0] * sizes.sum())
        text = made.kernel.pack(SampleRandom(9, 2, int(index)))
        number = int(text[1]) - FIRST_WORD
        assert len(text) == sizes[number] + 2
        assert sizes[:number].sum() <= token < sizes[: number + 1].sum()
        assert first_sizes[index] == sizes[number]


def test_a_long_document_starts_at_a_sentence():
    corpus = random_documents([3000], sentence_length=4)
    document = corpus[0].tolist()
    made = packer(corpus, one_document=True)
    starts = []
    for index in range(400):
        part = split(made.kernel.pack(SampleRandom(1, 1, index)))[0][0]
        start = find(part, document)
        starts.append(start)
        follows_end = ENDS[document[start - 1]] and not ENDS[document[start]]
        assert start == 0 or follows_end
    assert min(starts) < 300
    assert max(starts) > 2700
    anywhere = packer(corpus, one_document=True, non_sentence_start=1.0)
    parts = [split(anywhere.kernel.pack(SampleRandom(1, 1, index)))[0][0] for index in range(400)]
    in_sentence = [not ENDS[document[find(part, document) - 1]] for part in parts]
    assert np.mean(in_sentence) > 0.6


def test_a_text_cut_on_the_right_ends_with_a_sentence_if_half_is_kept():
    corpus = random_documents([3000], sentence_length=10)
    made = packer(corpus, one_document=True)
    for index in range(300):
        text = made.kernel.pack(SampleRandom(1, 1, index))
        assert len(text) >= 32
        assert text[-1] == EOS or ENDS[text[-1]] or len(text) == 64
    without_ends = packer(DocumentList([np.arange(FIRST_WORD, 500)]), one_document=True)
    assert {len(without_ends.kernel.pack(SampleRandom(1, 1, index))) for index in range(50)} == {64}


def test_a_document_that_just_fits_is_whole():
    for length in (61, 62):
        text = packer(random_documents([length]), one_document=True).kernel.pack(SampleRandom(1, 1, 1))
        assert len(text) == length + 2
        assert text[-1] == EOS
    assert len(packer(random_documents([63])).kernel.pack(SampleRandom(1, 1, 1))) <= 64


def test_a_stored_end_of_document_is_not_doubled():
    document = np.r_[np.arange(20, 30), EOS]
    text = packer(DocumentList([document]), one_document=True).kernel.pack(SampleRandom(1, 1, 1))
    assert text.tolist() == [CLS, *range(20, 30), EOS]


def test_short_texts_have_every_length():
    made = packer(random_documents([5000], sentence_length=10**9), seq_length=128, short_seq_prob=0.25)
    lengths = np.array([len(made.kernel.pack(SampleRandom(1, 1, index))) for index in range(3000)])
    assert abs((lengths < 128).mean() - 0.25 * 95 / 96) < 0.03
    assert lengths.min() in (32, 33)


def test_narrow_integer_types_are_read_as_they_are():
    corpus = random_documents([50, 500])
    narrow = DocumentList([])
    narrow._documents = [corpus[number].astype(np.uint16) for number in range(2)]
    narrow.sizes = corpus.sizes
    for index in range(50):
        wide = packer(corpus).kernel.pack(SampleRandom(1, 1, index))
        assert packer(narrow).kernel.pack(SampleRandom(1, 1, index)).tolist() == wide.tolist()


@pytest.mark.parametrize(
    "text", [".", "?", "!", "end.", '."', ".)", "。", "！", "？”", "；", "…", "：", "\n", " ;", ":", "。』"]
)
def test_texts_that_end_a_sentence(text):
    assert ends_sentence(text)


@pytest.mark.parametrize("text", ["", " ", "a", ",", "，", "、", '"', ")", "3.14", "U.S", "-"])
def test_texts_that_do_not(text):
    assert not ends_sentence(text)


def test_sentence_end_ids_leave_out_command_tokens():
    assert np.flatnonzero(ENDS).tolist() == [FULL_STOP, CHINESE_STOP, QUESTION]

    class Odd(NumberTokenizer):
        def decode(self, ids):
            return "."

    ends = sentence_end_ids(Odd())
    assert not ends[[CLS, EOS]].any()
    assert ends[30]
