"""Span samplers: equal to slow Python for the same random stream, and with the statistics that they promise."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_samples import PlainDataset, segments

from ftk.data.random import SampleRandom
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples.spans import Blanks, poisson_weights, span_drawer
from tests.data.number_corpus import CHINESE_STOP, CLS, EOS, FULL_STOP, QUESTION, VOCAB_SIZE
from tests.data.reference_random import SlowRandom

ENDS = np.zeros(VOCAB_SIZE, dtype=np.uint8)
ENDS[[FULL_STOP, CHINESE_STOP, QUESTION]] = 1
SPECIAL = SimpleNamespace(eos=EOS, cls=CLS)
WEIGHTS = poisson_weights(3.0, 39)


SENTENCES, DOCUMENTS = {"bert_prob": 0.0, "gap_sentence_prob": 1.0}, {"bert_prob": 0.0, "gap_sentence_prob": 0.0}
OBJECTIVES = [
    *({"bert_ratio": ratio, "avg_block_length": mean} for ratio in (0.05, 0.15, 0.5) for mean in (0.3, 3.0, 20.0)),
    *({"single_span_prob": 1.0, "avg_block_length": mean} for mean in (0.3, 3.0, 20.0)),
    *(SENTENCES | {"gap_sentence_ratio": ratio} for ratio in (0.05, 0.15, 0.5)),
    *(DOCUMENTS | {"gpt_min_ratio": ratio} for ratio in (0.0, 0.25, 1.0)),
]

packed_texts = st.lists(
    st.lists(st.one_of(st.integers(20, 40), st.sampled_from([FULL_STOP, QUESTION])), max_size=60),
    min_size=1,
    max_size=6,
)


def pack(documents, cut):
    tokens = [token for document in documents for token in [CLS, *document, EOS]]
    return np.array(tokens[: len(tokens) - cut], dtype=np.int64)


def drawn(tokens, rng, objective, **options):
    """The spans of an objective and whether an end token follows each answer."""
    chosen = {"bert_prob": float(objective == "token"), "gap_sentence_prob": float(objective == "sentence")}
    _, spans, _, append_end = span_drawer(SPECIAL, BlankInfillingConfig(**chosen, **options), ENDS).sample(tokens, rng)
    return spans, append_end


@given(packed_texts, st.integers(0, 1), st.integers(0, 1000), st.sampled_from(OBJECTIVES))
@settings(max_examples=800, deadline=None)
def test_spans_of_every_objective_equal_the_slow_version(documents, cut, seed, options):
    tokens = pack(documents, cut)
    config = BlankInfillingConfig(**{"bert_prob": 1.0, "gap_sentence_prob": 0.0, **options}, shuffle_blocks=False)
    weights = poisson_weights(config.avg_block_length, config.max_block_length)
    slow = PlainDataset(SimpleNamespace(sizes=[1]), SPECIAL, config, ENDS, weights)
    objective, spans, _, append_end = span_drawer(SPECIAL, config, ENDS).sample(tokens, SampleRandom(seed, 1, 1))
    expected = slow.blanks(tokens, SlowRandom(seed, 1, 1))
    assert (objective, [tuple(span) for span in spans.tolist()], append_end) == expected


@given(packed_texts, st.integers(0, 1), st.integers(0, 1000), st.sampled_from([(1, 0), (0, 1), (0, 0)]))
@settings(max_examples=300, deadline=None)
def test_spans_of_every_objective_stay_inside_documents(documents, cut, seed, probabilities):
    tokens = pack(documents, cut)
    config = BlankInfillingConfig(bert_prob=probabilities[0], gap_sentence_prob=probabilities[1])
    blanks = Blanks(*span_drawer(SPECIAL, config, ENDS).sample(tokens, SampleRandom(seed, 1, 1)))
    assert len(blanks.spans) > 0 or not segments(tokens, EOS, CLS)
    assert sorted(blanks.answer_order.tolist()) == list(range(len(blanks.spans)))
    least_gap = 1 if blanks.objective == 0 else 0
    previous_end = -1
    for start, end in blanks.spans.tolist():
        assert previous_end + least_gap <= start < end <= len(tokens)
        inside = tokens[start:end] if blanks.append_end else tokens[start : end - 1]
        assert not np.isin(inside, [EOS, CLS]).any()
        assert tokens[end - 1] != CLS
        previous_end = end


def long_text(documents=1, length=2000):
    return np.concatenate([np.r_[CLS, np.full(length, 30), EOS] for _ in range(documents)]).astype(np.int64)


def test_span_lengths_are_poisson():
    """Chi-square against Poisson(3) cut to 1 .. 39. Texts are long, so that the drawn-until rule hardly shows."""
    tokens = long_text(length=20_000)
    counts = np.zeros(40)
    for index in range(30):
        spans, _ = drawn(tokens, SampleRandom(11, 1, index), "token")
        counts += np.bincount(spans[:, 1] - spans[:, 0], minlength=40)[:40]
    probabilities = np.diff(WEIGHTS, prepend=0.0) / WEIGHTS[-1]
    observed = np.append(counts[1:10], counts[10:].sum())
    expected = counts.sum() * np.append(probabilities[:9], probabilities[9:].sum())
    assert counts.sum() > 25_000
    assert counts[0] == 0
    assert ((observed - expected) ** 2 / expected).sum() < 27.9  # 0.1 % point, 9 degrees of freedom


@pytest.mark.parametrize(("documents", "length"), [(1, 510), (4, 126), (20, 23), (60, 6)])
def test_the_token_objective_covers_fifteen_percent(documents, length):
    """Of all, and about as much of each document; of the shortest only one span in three fits."""
    tokens = long_text(documents, length)
    covered = np.zeros(len(tokens))
    for index in range(2000):
        for start, end in drawn(tokens, SampleRandom(5, 1, index), "token")[0]:
            covered[start:end] += 1
    share = covered.mean() / 2000
    assert 0.145 < share < 0.16
    by_document = covered.reshape(documents, length + 2)[:, 1:-1].mean(axis=1) / 2000
    assert by_document.min() > 0.1
    assert by_document.max() < 0.3


def test_blanks_lie_anywhere_in_a_document():
    tokens = long_text(length=100)
    covered = np.zeros(len(tokens))
    for index in range(4000):
        for start, end in drawn(tokens, SampleRandom(5, 2, index), "token")[0]:
            covered[start:end] += 1
    share = covered[1:-1] / 4000
    assert share.min() > 0.04
    assert share.max() < 0.25
    assert covered[0] == covered[-1] == 0


def test_sentences_are_whole_and_cover_at_least_their_share():
    generator = np.random.default_rng(0)
    for index in range(300):
        tokens = np.full(300, 30, dtype=np.int64)
        tokens[generator.choice(np.arange(1, 299), 20, replace=False)] = FULL_STOP
        tokens[0], tokens[-1] = CLS, EOS
        spans, _ = drawn(tokens, SampleRandom(5, 3, index), "sentence")
        lengths = spans[:, 1] - spans[:, 0]
        assert lengths.sum() >= 45
        assert lengths.sum() - lengths.max() < 45
        for start, end in spans:
            assert start == 1 or tokens[start - 1] == FULL_STOP
            assert end == 299 or tokens[end - 1] == FULL_STOP


def test_document_spans_have_uniform_lengths_and_both_forms():
    tokens = long_text(length=101)
    lengths, suffixes = [], 0
    for index in range(5000):
        spans, append_end = drawn(tokens, SampleRandom(5, 4, index), "document", gpt_infill_prob=0.3)
        is_suffix = not append_end
        start, end = spans[0]
        lengths.append(end - start - is_suffix)
        suffixes += is_suffix
        assert not is_suffix or end == len(tokens)
    assert abs(suffixes / 5000 - 0.3) < 0.03
    counts = np.bincount(lengths)[50:]
    assert min(lengths) == 50
    assert max(lengths) == 100
    assert ((counts - 5000 / 51) ** 2 / (5000 / 51)).sum() < 86.7  # 0.1 % point, 50 degrees of freedom


def test_packed_documents_are_blanked_in_proportion_to_their_length_and_at_their_end():
    tokens = np.concatenate([long_text(1, 30), long_text(1, 90)])
    first = 0
    for index in range(3000):
        spans, append_end = drawn(tokens, SampleRandom(5, 5, index), "document", gpt_infill_prob=0.0)
        assert not append_end
        assert spans[0, 1] in (32, 124)
        first += spans[0, 1] == 32
    assert abs(first / 3000 - 0.25) < 0.03


def test_poisson_weights_are_the_running_sums_of_the_probabilities():
    assert poisson_weights(3.0, 4) == pytest.approx([0.1493612, 0.3734030, 0.5974448, 0.7654761], abs=1e-6)
