"""Samples of causal language modeling against a ring of tokens written out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ftk.data.corpora.documents import DocumentList
from ftk.errors import UserError
from ftk.tasks.causal_lm.samples import CausalDataset
from ftk.tasks.causal_lm.task import CausalLMConfig
from ftk.tasks.language_model import check_positions

END = 0
DOCUMENTS = [[11, 12, 13], [21], [], [31, 32, 33, 34, 35, 36, 37], [41, 42]]
RING = [token for document in DOCUMENTS for token in [*document, END]]
NUMBERS = [number for number, document in enumerate(DOCUMENTS) for _ in [*document, END]]


def dataset(seq_length: int, documents: list = DOCUMENTS, **options: bool) -> CausalDataset:
    return CausalDataset(DocumentList(documents), 10**6, END, CausalLMConfig(seq_length=seq_length, **options), seed=5)


@pytest.mark.parametrize("seq_length", [1, 4, 5, 18, 50])
def test_an_epoch_goes_round_the_ring_once(seq_length: int) -> None:
    data = dataset(seq_length)
    starts = set()
    for epoch in range(1, 30):
        samples = [data.sample(epoch, index) for index in range(len(data))]
        assert data.sizes(epoch).tolist() == [len(sample["tokens"]) for sample in samples]
        tokens, targets = (
            np.concatenate([sample[name] for sample in samples]).tolist() for name in ("tokens", "targets")
        )
        start = next(place for place in range(len(RING)) if RING[place:] + RING[:place] == tokens)
        assert targets == tokens[1:] + tokens[:1]
        assert all(sample["loss_mask"].all() for sample in samples)
        starts.add(start)
    assert len(starts) > 10  # it begins elsewhere in each epoch


@pytest.mark.parametrize("seq_length", [4, 7, 40])
def test_documents_are_kept_apart(seq_length: int) -> None:
    data = dataset(seq_length, document_mask=True, restart_positions=True, end_loss=False)
    plain = dataset(seq_length)
    for index in range(len(data)):
        sample, start = data.sample(1, index), RING.index(31) - plain_place(plain, 31)
        places = [(start + index * seq_length + place) % len(RING) for place in range(len(sample["tokens"]) + 1)]
        assert sample["tokens"].tolist() == [RING[place] for place in places[:-1]]
        since = 0
        for at, (place, following) in enumerate(zip(places[:-1], places[1:], strict=True)):
            new = at > 0 and (place == 0 or NUMBERS[place] != NUMBERS[places[at - 1]])
            since = 0 if new or at == 0 else since + 1
            assert sample["position_ids"][at] == since
            if at:
                assert (sample["document_ids"][at] != sample["document_ids"][at - 1]) == new
            inside = NUMBERS[place] == NUMBERS[following]
            assert sample["loss_mask"][at] == (inside and RING[following] != END)


@pytest.mark.parametrize(("share", "length"), [(0.125, 16), (0.5, 16), (0.61, 24), (0.999, 40)])
def test_shortened_samples_begin_as_the_whole_ones(share: float, length: int) -> None:
    data = dataset(47, [list(range(1, 900))], restart_positions=True)
    short = data.shortened(share)
    assert len(short) == len(data)
    for index in range(len(data)):
        whole, part = data.sample(2, index), short.sample(2, index)
        assert len(part["tokens"]) == min(length, len(whole["tokens"]))
        assert all(np.array_equal(part[name], whole[name][:length]) for name in whole)


def plain_place(data: CausalDataset, token: int) -> int:
    """Where a token stands in the first epoch."""
    return int(np.concatenate([data.sample(1, index)["tokens"] for index in range(len(data))]).tolist().index(token))


def test_a_prefix_stands_in_front_of_each_document() -> None:
    data = CausalDataset(DocumentList(DOCUMENTS), 10**6, END, CausalLMConfig(seq_length=4), seed=5, prefix=[8, 9])
    ring = [token for document in DOCUMENTS for token in [8, 9, *document, END]]
    tokens = np.concatenate([data.sample(1, index)["tokens"] for index in range(len(data))]).tolist()
    assert tokens in [ring[place:] + ring[:place] for place in range(len(ring))]


def test_one_short_document_fills_a_sample_again_and_again() -> None:
    sample = dataset(3, [[7, 8]], document_mask=True).sample(1, 0)
    assert sorted(sample["tokens"].tolist()) == [END, 7, 8]
    assert sample["loss_mask"].sum() == 2


def test_no_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="the data has no tokens"):
        dataset(4, [[], []])
    with pytest.raises(IndexError, match="sample 5 of 5"):
        dataset(4).sample(1, 5)


def test_a_model_of_a_plugin_may_have_no_limit_of_positions() -> None:
    check_positions(SimpleNamespace(), SimpleNamespace(seq_length=8), 8)
