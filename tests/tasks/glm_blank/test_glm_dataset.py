"""GLM samples of a corpus: pure functions of (seed, epoch, index), within their limits, with the options' effects."""

from __future__ import annotations

import numpy as np
import pytest

from ftk.config.build import build_options
from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.tasks.glm_blank.config import BlankInfillingConfig, max_sample_length
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset
from ftk.tasks.glm_blank.samples.infilling import build_sample
from tests.data.number_corpus import CLS, EOS, GMASK, MASK, SMASK, NumberTokenizer, random_documents

MIXED_LENGTHS = [3, 1, 0, 700, 40, 25, 90, 200, 8, 12, 60, 150, 5000, 2, 33] * 4


def dataset(tokenizer=None, *, lengths=MIXED_LENGTHS, seed=1, **options):
    config = BlankInfillingConfig(**{"seq_length": 128, "bert_prob": 0.4, "gap_sentence_prob": 0.3, **options})
    assert mistakes(config) == []
    return GLMBlankDataset(random_documents(lengths), tokenizer or NumberTokenizer(), config, seed)


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_a_sample_depends_on_seed_epoch_and_index_only():
    forward, backward = dataset(), dataset()
    numbers = list(range(60))
    first = {number: forward.sample(3, number) for number in numbers}
    second = {number: backward.sample(3, number) for number in reversed(numbers)}
    assert all(same(first[number], second[number]) for number in numbers)
    assert not any(same(first[number], forward.sample(4, number)) for number in numbers)
    assert not any(same(first[number], dataset(seed=2).sample(3, number)) for number in numbers)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bert_prob": 1.0, "gap_sentence_prob": 0.0},
        {"bert_prob": 0.0, "gap_sentence_prob": 1.0},
        {"bert_prob": 0.0, "gap_sentence_prob": 0.0},
        {"sample_one_document": True},
        {"short_seq_prob": 0.5},
        {"random_position": True},
        {"sentinel_tokens": True},
        {"avg_block_length": 0.2},
        {"bert_ratio": 0.5, "gap_sentence_ratio": 0.5},
        {"seq_length": 8},
        {"seq_length": 1024, "single_span_prob": 0.3},
    ],
    ids=str,
)
def test_samples_keep_within_their_limits(options):
    """The longest sample, its bound for batching, positions, the mask, and that each is what build_sample makes."""
    made = dataset(**options)
    sizes = made.sizes(1)
    assert sizes.shape == (len(made),)
    assert sizes.dtype == np.int32
    assert sizes.max() <= max_sample_length(made.config)
    checked = 0
    for number in range(min(len(made), 250)):
        text, blanks, sample = made.explain(1, number)
        assert len(text) <= made.config.seq_length
        assert len(sample.tokens) <= sizes[number]
        assert sample.position_ids.min() >= 0
        assert sample.position_ids.max() <= made.config.seq_length
        assert not sample.loss_mask[: sample.context_length].any()
        assert sample.loss_mask[sample.context_length :].all()
        assert blanks.append_end or blanks.objective == 2
        assert text[0] == CLS
        rebuilt = build_sample(
            text,
            blanks.spans,
            blanks.spans[blanks.answer_order],
            ("token", "sentence", "document")[blanks.objective],
            special=made.special,
            append_end=blanks.append_end,
            sentinels=made.sentinels,
            position_offset=int(sample.position_ids[0, 0]),
            answer_position=made.config.seq_length if made.config.sentinel_tokens else None,
        )
        assert np.array_equal(rebuilt.tokens, sample.tokens)
        assert np.array_equal(rebuilt.position_ids, sample.position_ids)
        checked += bool(sample.loss_mask.any())
    assert checked > 0.95 * min(len(made), 250)


@pytest.mark.parametrize(
    "options", [{}, {"short_seq_prob": 0.5}, {"non_sentence_start": 1.0, "document_mask": True}], ids=str
)
@pytest.mark.parametrize(("share", "length"), [(0.125, 16), (0.6, 72), (0.9999, 120)])
def test_shortened_samples_are_those_of_a_shorter_seq_length(options, share, length):
    short, expected = dataset(**options).shortened(share), dataset(seq_length=length, **options)
    indices = np.arange(len(short))
    made = short.samples(2, indices)
    assert all(same(one, expected.sample(2, index)) for index, one in enumerate(made))
    assert short.sizes(2).max() >= expected.sizes(2).max() >= made.lengths.max()


def test_samples_of_one_document_are_not_shortened():
    assert dataset(sample_one_document=True).shortened(0.5) is None


def test_each_objective_has_its_mask_and_its_share():
    made = dataset(lengths=[3000] * 40, bert_prob=0.5, gap_sentence_prob=0.3)
    counts = np.zeros(3)
    for number in range(900):
        sample = made.sample(1, number)
        objective = int(sample["objective"])
        counts[objective] += 1
        context = sample["tokens"][: sample["context_length"]]
        present = [bool((context == mask).any()) for mask in (MASK, SMASK, GMASK)]
        assert present == [objective == 0, objective == 1, objective == 2]
    expected = 900 * np.array([0.5, 0.3, 0.2])
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # 0.1 % point, 2 degrees of freedom


def test_an_epoch_has_the_samples_that_make_up_its_tokens():
    assert len(dataset(lengths=[1280])) == 10
    assert len(dataset(lengths=[1281])) == 11
    assert len(dataset(lengths=[5])) == 1


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"dblock": None}, {"block_mask_prob": 0.1}, "dBLOCK"),
        ({"sentinels": 0}, {"sentinel_tokens": True}, "numbered masks"),
        ({"sop": None}, {}, "has no sop"),
    ],
)
def test_missing_command_tokens_are_refused(changes, options, message):
    with pytest.raises(UserError, match=message):
        dataset(NumberTokenizer(**changes), **options)


def test_empty_data_is_refused():
    for lengths in ([], [0, 0]):
        with pytest.raises(UserError, match="no tokens"):
            dataset(lengths=lengths)


def test_documents_that_hold_only_their_end_give_samples_without_loss():
    config = BlankInfillingConfig(seq_length=16)
    documents = random_documents([0, 0])
    documents._documents = [np.array([EOS]), np.array([EOS])]
    documents.sizes = np.array([1, 1])
    for number in range(10):
        sample = GLMBlankDataset(documents, NumberTokenizer(), config, number).sample(1, 0)
        assert not sample["loss_mask"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_length": 7}, "seq_length is 7"),
        ({"bert_prob": 0.8, "gap_sentence_prob": 0.3}, "together they must be at most 1"),
        ({"bert_prob": -0.1}, "bert_prob is -0.1"),
        ({"bert_ratio": 0.9}, "bert_ratio is 0.9"),
        ({"avg_block_length": 0.0}, "avg_block_length is 0.0"),
        ({"max_block_length": 0}, "max_block_length is 0"),
        ({"context_mask_range": 0}, "context_mask_range is 0"),
    ],
)
def test_wrong_options_are_named(change, message):
    with pytest.raises(UserError, match=message):
        build_options("task", BlankInfillingConfig, change)
