"""Blends: exact proportions at every prefix, every corpus gone through evenly, shards by turns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.batch import Batch
from ftk.data.batches.iterator import EpochBatchIterator
from ftk.data.corpora._blending import blend_corpora
from ftk.data.corpora.blending import BlendedDataset, Part, ShardedDataset, weights_by_size


class Named:
    """Samples that say corpus, epoch and index."""

    def __init__(self, name, count, spread=1):
        self.name = name
        self.count = count
        self.spread = spread

    def __len__(self):
        return self.count

    def sizes(self, epoch):
        return (3 + (np.arange(self.count) * 7 + epoch) % self.spread).astype(np.int32)

    def sample(self, epoch, index):
        assert 0 <= index < self.count
        return {"id": (self.name, epoch, index), "size": int(self.sizes(epoch)[index])}


class Packed(Named):
    """Samples that say also how much of them there is."""

    share = 1.0

    def shortened(self, share):
        made = Packed(self.name, self.count, self.spread)
        made.share = share
        return made

    def sample(self, epoch, index):
        return super().sample(epoch, index) | {"share": self.share}


def test_a_blend_and_its_shards_are_shortened_together_or_not_at_all():
    shards = ShardedDataset([Packed("b", 6), Packed("c", 4)])
    parts = [Part("a", 9, Packed("a", 9)), Part("bc", 10, shards)]
    made = BlendedDataset(parts, [1, 1], 1)
    short = made.shortened(0.25)
    for epoch in (1, 2):
        indices, _ = made.epoch_order(epoch)
        found = short.samples(epoch, indices)
        assert [{**sample, "share": 1.0} for sample in found] == made.samples(epoch, indices)
        assert {sample["share"] for sample in found} == {0.25}
    mixed = ShardedDataset([Packed("b", 6), Named("c", 4)])
    assert mixed.shortened(0.25) is None
    assert BlendedDataset([parts[0], Part("bc", 10, mixed)], [1, 1], 1).shortened(0.25) is None


def blend(counts, weights=None, seed=1):
    parts = [Part(str(number), count * 3, Named(number, count, 5)) for number, count in enumerate(counts)]
    return BlendedDataset(parts, counts if weights is None else weights, seed)


def slow_blend(shares, count):
    """Tijdeman's rule, said again with NumPy."""
    least = 1 / (2 * len(shares) - 2) if len(shares) > 1 else 0.0
    counts, chosen = np.zeros(len(shares)), []
    for place in range(1, count + 1):
        lags = shares * place - counts
        able = np.flatnonzero((lags >= least - 1e-9) & (shares > 0))
        if not len(able):
            able = [np.where(shares > 0, lags, -np.inf).argmax()]
        deadlines = (1 - least - lags[able]) / shares[able]
        chosen.append(able[int(deadlines.argmin())])
        counts[chosen[-1]] += 1
    return chosen


weights_lists = st.lists(st.floats(1e-3, 1.0) | st.just(0.0), min_size=1, max_size=12).filter(lambda w: sum(w) > 0)


@given(weights_lists, st.integers(0, 300))
@settings(max_examples=150, deadline=None)
def test_every_prefix_is_within_one_sample_of_its_proportions(weights, count):
    shares = np.asarray(weights) / sum(weights)
    corpora = blend_corpora(shares, count)
    assert corpora.tolist() == slow_blend(shares, count)
    for number, share in enumerate(shares):
        off = np.cumsum(corpora == number) - share * np.arange(1, count + 1)
        assert count == 0 or np.abs(off).max() < 1
        assert share > 0 or not (corpora == number).any()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_by_their_sizes_each_epoch_has_every_sample_once(counts):
    made = blend(counts, weights_by_size(counts, 1.0))
    for epoch in (1, 2, 3):
        indices, sizes = made.epoch_order(epoch)
        got = [made.sample(epoch, index) for index in indices]
        expected = {(number, epoch, index) for number, count in enumerate(counts) for index in range(count)}
        assert {sample["id"] for sample in got} == expected
        assert len(got) == len(expected)
        assert sizes.tolist() == [sample["size"] for sample in got]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), weights_lists, st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_no_sample_comes_twice_before_all_of_its_corpus_came(counts, weights, epochs):
    """Over epochs, each corpus gives pass after pass, each whole, each sample with the draws of its pass."""
    weights = (weights * 4)[: len(counts)]
    made = blend(counts, weights if sum(weights) else None)
    given_out = {number: [] for number in range(len(counts))}
    for epoch in range(1, epochs + 1):
        for index in made.epoch_order(epoch)[0]:
            number, at, sample = made.sample(epoch, int(index))["id"]
            given_out[number].append((at, sample))
    for number, count in enumerate(counts):
        passes = [given_out[number][start : start + count] for start in range(0, len(given_out[number]), count)]
        for at, samples in enumerate(passes, start=1):
            assert {number_of_pass for number_of_pass, _ in samples} == {at}
            numbers = [sample for _, sample in samples]
            assert len(set(numbers)) == len(numbers)
            assert len(numbers) == count or at == len(passes)


def test_plain_indices_are_the_corpora_one_after_the_other():
    made = blend([3, 2], [1, 100])
    assert len(made) == 5
    assert [made.sample(1, index)["id"] for index in range(5)] == [
        (0, 1, 0),
        (0, 1, 1),
        (0, 1, 2),
        (1, 1, 0),
        (1, 1, 1),
    ]
    assert made.sizes(1).tolist() == [made.sample(1, index)["size"] for index in range(5)]


def test_several_samples_at_once_are_those_made_one_by_one():
    made = blend([7, 2], [1, 3])
    indices, _ = made.epoch_order(2)
    assert list(made.samples(2, indices)) == [made.sample(2, int(index)) for index in indices]


def test_the_order_is_a_function_of_seed_and_epoch():
    orders = [blend([40, 30], seed=seed).epoch_order(epoch)[0].tolist() for seed in (1, 2) for epoch in (1, 2)]
    assert len({tuple(order) for order in orders}) == 4
    assert blend([40, 30]).epoch_order(2)[0].tolist() == orders[1]


def test_temperature_takes_small_corpora_up():
    for temperature, share in ((1.0, 0.9), (2.0, 0.75), (1e9, 0.5)):
        weights = weights_by_size([900, 100], temperature)
        assert weights[0] / weights.sum() == pytest.approx(share)


def test_the_table_counts_samples_and_passes():
    table = blend([90, 10], [1, 1]).table()
    assert [share.samples for share in table] == [50, 50]
    assert [share.passes for share in table] == pytest.approx([50 / 90, 5.0])


def collate(samples):
    ids = torch.tensor([sample["id"] for sample in samples])  # [B, 3]
    return Batch({"tokens": ids}, targets=ids[:, 0], places=torch.arange(len(ids)))


def ids_of(batch):
    return [tuple(row) for row in batch.inputs["tokens"].tolist()]


def epoch_of(made):
    return [sample for batch in made.batches() for sample in ids_of(batch)]


def test_shards_take_turns_and_epochs_have_their_lengths():
    made = EpochBatchIterator(
        ShardedDataset([Named(number, count) for number, count in enumerate([5, 3])]), collate, batch_size=2
    )
    assert [made.batches_in(epoch) for epoch in (1, 2, 3)] == [3, 2, 3]
    for epoch in (1, 2, 3, 4):
        shard, count = (epoch - 1) % 2, (5, 3)[(epoch - 1) % 2]
        assert sorted(epoch_of(made)) == [(shard, epoch, index) for index in range(count)]


def test_a_sharded_corpus_in_a_blend_takes_one_shard_a_pass():
    sharded = ShardedDataset([Named("a", 4), Named("b", 6)])
    made = BlendedDataset([Part("ab", 0, sharded), Part("c", 0, Named("c", 5))], [1, 1], 1)
    assert made.samples_per_epoch == 10
    seen = [made.sample(epoch, int(index))["id"] for epoch in (1, 2, 3, 4) for index in made.epoch_order(epoch)[0]]
    of_shards = [sample for sample in seen if sample[0] != "c"]
    assert [name for name, _, _ in of_shards] == ["a"] * 4 + ["b"] * 6 + ["a"] * 4 + ["b"] * 6
    assert len(set(seen)) == len(seen) == 40


@pytest.mark.parametrize("stop", [1, 4, 7])
@pytest.mark.parametrize(("first", "second"), [((1, 0), (3, 0)), ((2, 0), (1, 2))])
def test_a_blend_is_resumed_by_other_ranks_and_workers(stop, first, second):
    """Stop all ranks in the middle of the second epoch; other ranks give the rest, nothing twice, in proportion."""

    def ranks(world_size, num_workers):
        return [
            EpochBatchIterator(
                blend([30, 17], [1, 2]),
                collate,
                batch_size=3,
                rank=rank,
                world_size=world_size,
                num_workers=num_workers,
            )
            for rank in range(world_size)
        ]

    (whole,) = ranks(1, 0)
    expected = [epoch_of(whole), epoch_of(whole)]
    seen, states = [], []
    for made in ranks(*first):
        made.load_state_dict({"epoch": 2, "samples_consumed": 0})
        for number, batch in enumerate(made.batches(), start=1):
            seen += ids_of(batch)
            if number == stop:
                break
        states.append(made.state_dict())
    assert all(state == states[0] for state in states)
    assert sorted(seen) == sorted(expected[1][: len(seen)])
    for made in ranks(*second):
        made.load_state_dict(states[0])
        for batch in made.batches():
            seen += ids_of(batch)
    assert sorted(set(seen)) == sorted(expected[1])
