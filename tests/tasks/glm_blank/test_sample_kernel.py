"""The sample kernel: the plain Python way's samples for the same random stream, one by one and in batches."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_samples import PlainDataset, collate

from ftk.data.batches._batching import batch_bounds
from ftk.data.batches.collate import Collater, SampleBatch
from ftk.data.corpora._blending import blend_corpora
from ftk.data.corpora._documents import TextPacker
from ftk.data.corpora.documents import sentence_end_ids
from ftk.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from ftk.data.random import SampleRandom
from ftk.errors import UserError
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples._infilling import build_arrays
from ftk.tasks.glm_blank.samples._samples import SampleMaker
from ftk.tasks.glm_blank.samples._spans import SpanDrawer
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset
from ftk.tasks.glm_blank.samples.spans import poisson_weights
from tests.data.number_corpus import NumberTokenizer, random_documents
from tests.data.reference_random import SlowRandom
from tests.dense import same_batches

LENGTHS = [3, 1, 0, 700, 40, 25, 90, 200, 8, 12, 60, 150, 1500, 2, 33]
TOKENIZER = NumberTokenizer(pad=599)


def both_ways(config, documents, seed=1):
    weights = poisson_weights(config.avg_block_length, config.max_block_length).tolist()
    slow = PlainDataset(documents, TOKENIZER.special, config, sentence_end_ids(TOKENIZER), weights)
    return GLMBlankDataset(documents, TOKENIZER, config, seed), slow


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert np.array_equal(left[name], right[name]), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bert_prob": 1.0, "gap_sentence_prob": 0.0},
        {"bert_prob": 0.0, "gap_sentence_prob": 1.0},
        {"bert_prob": 0.0, "gap_sentence_prob": 0.0, "gpt_min_ratio": 0.1},
        {"document_mask": True},
        {"sample_one_document": True, "document_mask": True, "gpt_infill_prob": 0.2},
        {"short_seq_prob": 0.5, "non_sentence_start": 0.5},
        {"random_position": True, "sample_one_document": True},
        {"sentinel_tokens": True, "document_mask": True},
        {"block_mask_prob": 0.3, "context_mask_ratio": 0.2, "shuffle_blocks": False, "block_positions": False},
        {"bert_ratio": 0.5, "gap_sentence_ratio": 0.5, "avg_block_length": 0.2},
        {"seq_length": 8},
        {"gmask_runs_on": True, "random_position": True, "block_positions": False},
        {"seq_length": 700, "single_span_prob": 0.3},
    ],
    ids=str,
)
def test_samples_equal_the_plain_way(options):
    config = BlankInfillingConfig(**{"seq_length": 128, "bert_prob": 0.4, "gap_sentence_prob": 0.3, **options})
    fast, slow = both_ways(config, random_documents(LENGTHS * 3))
    for index in range(min(len(fast), 60)):
        expected = slow.sample(SlowRandom(1, 2, index))
        assert_same(fast.sample(2, index), expected)


@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=8).filter(any),
    st.integers(0, 2**40),
    st.integers(8, 200),
    st.sampled_from([(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.4, 0.3)]),
    st.booleans(),
    st.sampled_from([{}, {"short_seq_prob": 1.0}, {"block_mask_prob": 0.5}, {"random_position": True}]),
)
@settings(max_examples=200, deadline=None)
def test_any_sample_equals_the_plain_way(lengths, seed, seq_length, probabilities, apart, options):
    config = BlankInfillingConfig(
        seq_length=seq_length,
        bert_prob=probabilities[0],
        gap_sentence_prob=probabilities[1],
        document_mask=apart,
        **options,
    )
    fast, slow = both_ways(config, random_documents(lengths, seed % 2**32, sentence_length=5), seed)
    assert_same(fast.sample(3, 0), slow.sample(SlowRandom(seed, 3, 0)))


@pytest.mark.parametrize("document_mask", [False, True])
def test_a_batch_holds_the_samples_that_are_made_one_by_one(document_mask):
    config = BlankInfillingConfig(seq_length=64, short_seq_prob=0.5, document_mask=document_mask)
    fast, slow = both_ways(config, random_documents(LENGTHS * 4))
    indices = np.array([5, 0, 17, 5, 30])
    made = fast.samples(1, indices)
    singles = [fast.sample(1, int(index)) for index in indices]
    assert isinstance(made, SampleBatch)
    assert len(set(made.lengths.tolist())) > 1
    for together, alone in zip(made, singles, strict=True):
        assert_same(together, alone)
    assert_same(made.arrays, collate([slow.sample(SlowRandom(1, 1, int(index))) for index in indices], 599))
    collater = Collater(TOKENIZER.special)
    assert same_batches(collater(made), collater(singles))


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", "<u2", "<i4", "<i8"])
def test_tokens_of_every_type_are_read_from_the_file(tmp_path, dtype):
    corpus = random_documents([700, 3, 40, 0, 200])
    narrow = [np.where(corpus[n] > 100, corpus[n] % 100 + 20, corpus[n]) for n in range(len(corpus))]
    with IndexedDatasetWriter(tmp_path / "train", np.dtype(dtype)) as writer:
        for document in narrow:
            writer.add(document)
    config = BlankInfillingConfig(seq_length=64)
    stored = IndexedDataset(tmp_path / "train")
    fast, slow = both_ways(config, stored)
    objects = GLMBlankDataset(NarrowDocuments(stored), TOKENIZER, config, 1)
    for index in range(len(fast)):
        expected = slow.sample(SlowRandom(1, 1, index))
        assert_same(fast.sample(1, index), expected)
        assert_same(objects.sample(1, index), expected)


class NarrowDocuments:
    """Documents one by one, without `tokens`; strided and in the other order of bytes."""

    def __init__(self, documents):
        self._documents = documents
        self.sizes = documents.sizes

    def __len__(self):
        return len(self._documents)

    def __getitem__(self, index):
        document = self._documents[index]
        if index % 2:
            return document.astype(document.dtype.newbyteorder(">"))
        return np.repeat(document, 2)[::2]


class Unreadable(NarrowDocuments):
    def __getitem__(self, index):
        raise OSError("the disk is gone")


def test_an_error_of_the_documents_arrives():
    made = GLMBlankDataset(Unreadable(random_documents([50] * 9)), TOKENIZER, BlankInfillingConfig(seq_length=64), 1)
    for ask in (lambda: made.sample(1, 0), lambda: made.samples(1, np.arange(3)), lambda: made.explain(1, 0)):
        with pytest.raises(OSError, match="the disk is gone"):
            ask()


def test_no_samples_and_wrong_numbers():
    made = GLMBlankDataset(random_documents([500] * 9), TOKENIZER, BlankInfillingConfig(seq_length=64), 1)
    assert len(made.samples(1, np.empty(0, dtype=np.int64))) == 0
    with pytest.raises(IndexError, match="sample 100000 of"):
        made.samples(1, np.array([0, 100000]))
    with pytest.raises(IndexError, match="sample -1 of"):
        made.samples(1, np.array([-1]))
    for index in (-1, len(made)):
        with pytest.raises(IndexError):
            made.sample(1, index)


@pytest.mark.parametrize("wrap", [IndexedDataset, lambda prefix: NarrowDocuments(IndexedDataset(prefix))])
def test_threads_get_the_same_samples(tmp_path, wrap):
    corpus = random_documents(LENGTHS * 4)
    with IndexedDatasetWriter(tmp_path / "train", np.uint16) as writer:
        for number in range(len(corpus)):
            writer.add(corpus[number])
    config = BlankInfillingConfig(seq_length=128, block_mask_prob=0.1)
    made = GLMBlankDataset(wrap(tmp_path / "train"), TOKENIZER, config, 1)

    def batch(start):
        return made.samples(1, np.arange(start, start + 10)).arrays

    expected = {start: batch(start) for start in range(0, 40, 10)}
    with ThreadPoolExecutor(4) as pool:
        starts = [0, 10, 20, 30] * 20
        for start, arrays in zip(starts, pool.map(batch, starts), strict=True):
            assert_same(arrays, expected[start])


def test_copies_make_the_same_samples():
    made = GLMBlankDataset(random_documents(LENGTHS), TOKENIZER, BlankInfillingConfig(seq_length=128), 1)
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert_same(again.sample(1, 3), made.sample(1, 3))


def ids(*values):
    return np.array(values, dtype=np.int64)


def spans_of(*pairs):
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def arrays_of(spans, order, masks=2):
    masks = np.zeros(masks, dtype=np.int64)
    return build_arrays(ids(1, 2, 3, 4), spans, order, masks, masks, 9, True, True, 0, -1)


def packer(cumulative, seq_length=32):
    documents = SimpleNamespace(tokens=np.full(100, 30))
    return TextPacker(documents, cumulative, np.zeros(600), 0, 2, seq_length, 0.0, 0.0, False)


def drawer(*ratios, weights=(1.0, 2.0)):
    return SpanDrawer(0, 2, (0.0, 1.0, 0.0, 0.0), ratios or (0.15, 0.1, 0.1), 0.5, weights, np.zeros(600), True)


def maker(most_spans):
    masks, commands = np.zeros((3, most_spans)), (0, 0, 2, 7, 10)
    rest = (commands, True, False, False, -1, -1, 0.0, 0.0, 3)
    return SampleMaker(packer(ids(100)), drawer(0.5, 0.1, 0.1), most_spans, masks, masks[0], *rest)


OUTSIDE = {
    "a span behind the text": lambda: arrays_of(spans_of((3, 5)), ids(0)),
    "a span before the text": lambda: arrays_of(spans_of((-1, 1)), ids(0)),
    "an empty span": lambda: arrays_of(spans_of((1, 1)), ids(0)),
    "spans in each other": lambda: arrays_of(spans_of((0, 2), (1, 3)), ids(0, 1)),
    "an answer of no span": lambda: arrays_of(spans_of((0, 2)), ids(1)),
    "an answer twice": lambda: arrays_of(spans_of((0, 1), (2, 3)), ids(0, 0)),
    "too few answers": lambda: arrays_of(spans_of((0, 1), (2, 3)), ids(0)),
    "too few masks": lambda: arrays_of(spans_of((0, 1), (2, 3)), ids(0, 1), masks=1),
    "triples": lambda: arrays_of(np.array([[0, 1, 2]]), ids(0)),
    "no documents": lambda: packer(ids()),
    "documents without tokens": lambda: packer(ids(0, 0)),
    "texts without tokens": lambda: packer(ids(100), seq_length=0),
    "more tokens than there are": lambda: drawer(2.0, 0.1, 0.1),
    "more sentences than there are": lambda: drawer(0.1, 5.0, 0.1),
    "more of a document than there is": lambda: drawer(0.1, 0.1, 1.5),
    "a ratio that is no number": lambda: drawer(float("nan"), 0.1, 0.1),
    "no span lengths": lambda: drawer(weights=()),
    "span lengths of no weight": lambda: drawer(weights=(0.0, 0.0)),
    "room for too few spans": lambda: maker(2),
    "a multiple of nothing": lambda: batch_bounds(np.ones(3, dtype=np.int32), 2, 0, 0),
    "no corpora": lambda: blend_corpora(np.empty(0), 5),
    "shares of nothing": lambda: blend_corpora(np.zeros(3), 5),
    "shares that are no numbers": lambda: blend_corpora(np.array([np.nan, 1.0]), 5),
    "too many corpora": lambda: blend_corpora(np.full(70_000, 1 / 70_000), 5),
    "fewer than no samples": lambda: blend_corpora(np.ones(1), -5),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_kernels_refuse_what_would_have_them_read_or_write_outside_of_arrays(case):
    with pytest.raises((ValueError, IndexError)):
        OUTSIDE[case]()


@pytest.mark.parametrize("cumulative", [(-20, 100), (1000, 100), (1 << 62, -(1 << 62), 100)])
def test_running_sums_that_are_wrong_are_an_error_not_a_crash(cumulative):
    made = packer(ids(*cumulative))
    with pytest.raises(UserError, match="does not lie within the tokens"):
        all(len(made.pack(SampleRandom(1, 1, index))) for index in range(100))


def test_an_index_that_is_altered_under_a_run_is_an_error_not_a_crash(tmp_path):
    with IndexedDatasetWriter(tmp_path / "train", np.uint16) as writer:
        for _ in range(4):
            writer.add(np.arange(100))
    dataset = IndexedDataset(tmp_path / "train")
    for at, value in ((dataset.layout.pointers_at, 1 << 40), (dataset.layout.pointers_at + 16, -(1 << 40))):
        with open(tmp_path / "train.idx", "r+b") as file:
            file.seek(at)
            file.write(value.to_bytes(8, "little", signed=True))
    for number in (0, 2):
        for read in (dataset.__getitem__, dataset.get):
            with pytest.raises(OSError, match="Index changed"):
                read(number)
    assert dataset[1].tolist() == list(range(100))
