"""The order of an epoch: length windows, short samples first, long ones dropped; resumed with other limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.batch import Batch
from ftk.data.batches.iterator import EpochBatchIterator
from ftk.data.batches.order import Limits, Ordering, order_epoch, sort_windows
from ftk.errors import UserError


class Lengths:
    """Samples of random lengths from 1 to 100."""

    def __init__(self, count, seed=0):
        self.lengths_of_samples = np.random.default_rng(seed).integers(1, 101, count).astype(np.int32)

    def __len__(self):
        return len(self.lengths_of_samples)

    def sizes(self, epoch):
        return self.lengths_of_samples

    def sample(self, epoch, index):
        return {"id": index}


def collate(samples):
    ids = [sample["id"] for sample in samples]
    tokens = torch.tensor(ids)[:, None]
    return Batch({"tokens": tokens}, targets=tokens[:, 0], places=torch.arange(len(ids)))


def iterator(count=500, dataset=None, **options):
    limits = {"max_tokens": 600} if "batch_size" not in options else {}
    return EpochBatchIterator(dataset or Lengths(count), collate, seed=3, **{**limits, **options})


def epoch_of(made):
    return [batch.inputs["tokens"][:, 0].tolist() for batch in made.batches()]


def padding(dataset, batches):
    """Share of the tokens of padded batches that is padding."""
    sizes = dataset.sizes(1)
    padded = sum(sizes[ids].max() * len(ids) for ids in batches)
    return 1 - sum(int(sizes[ids].sum()) for ids in batches) / padded


orderings = st.builds(
    Ordering,
    limits=st.builds(Limits, st.none() | st.integers(1, 9), st.integers(100, 400), st.sampled_from([1, 4])),
    window=st.sampled_from([0, 1, 10, 37, 1000]),
    short_first=st.integers(-1, 12),
)


@given(st.integers(0, 200), orderings, st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_sorting_moves_samples_within_their_windows_only(count, ordering, epoch):
    dataset = Lengths(count)
    plain = order_epoch(dataset, 7, epoch, True, Ordering(ordering.limits))
    made = order_epoch(dataset, 7, epoch, True, ordering)
    assert sorted(made.indices.tolist()) == list(range(count))
    assert made.sizes.tolist() == dataset.sizes(epoch)[made.indices].tolist()
    bounds = ordering.limits.cut(plain.sizes)
    first = bounds[-1] if ordering.short_first < 0 else bounds[min(ordering.short_first, len(bounds) - 1)]
    assert sorted(made.indices[:first]) == sorted(plain.indices[:first])
    if ordering.short_first:
        assert (np.diff(made.sizes[:first]) >= 0).all()
    if made.bounds is not None:
        assert made.bounds[0] == 0
        assert made.bounds[-1] == count
        counts = np.diff(made.bounds)
        for start, stop in zip(made.bounds, made.bounds[1:], strict=False):
            assert made.sizes[start:stop].max() * (stop - start) <= ordering.limits.max_tokens
        most = counts.max(initial=0)
        for stop in range(first + ordering.window, count, ordering.window):  # a batch may lie across two windows
            before, after = set(made.indices[:stop]), set(plain.indices[:stop])
            assert len(before - after) <= most


@given(st.lists(st.integers(0, 2**31 - 1), max_size=80), st.integers(1, 100))
@settings(max_examples=200, deadline=None)
def test_windows_are_sorted_up_and_down(sizes, window):
    expected = []
    for number, start in enumerate(range(0, len(sizes), window)):
        places = range(start, min(start + window, len(sizes)))
        expected += sorted(places, key=lambda place: (-sizes[place] if number % 2 else sizes[place], place))
    assert sort_windows(np.array(sizes, dtype=np.int32), window).tolist() == expected


def test_length_windows_save_padding_and_shuffle_batches():
    dataset = Lengths(5000)
    plain, sorted_ = epoch_of(iterator(dataset=dataset)), epoch_of(iterator(dataset=dataset, bucket_window=1000))
    assert sorted(sum(sorted_, [])) == list(range(5000))
    assert padding(dataset, plain) > 0.35
    assert padding(dataset, sorted_) < 0.05
    longest = [dataset.sizes(1)[ids].max() for ids in sorted_]
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.2  # neighbours say nothing about each other
    made = iterator(dataset=dataset, bucket_window=1000)
    assert epoch_of(made) == sorted_
    assert epoch_of(made) != sorted_


def test_batch_size_gives_full_batches_in_windows_that_do_not_divide():
    sizes = [len(ids) for ids in epoch_of(iterator(103, batch_size=8, bucket_window=50))]
    assert sorted(sizes) == [7, *[8] * 12]


def test_the_curriculum_begins_with_short_samples_and_ends_with_the_first_epoch():
    dataset = Lengths(400)
    made = iterator(dataset=dataset, batch_size=5, short_first=30)
    first, second = epoch_of(made), epoch_of(made)
    assert (np.diff(dataset.sizes(1)[sum(first[:30], [])]) >= 0).all()
    assert (np.diff(dataset.sizes(1)[sum(first[30:], [])]) < 0).any()
    assert (np.diff(dataset.sizes(1)[sum(second[:30], [])]) < 0).any()
    whole = epoch_of(iterator(dataset=dataset, batch_size=5, short_first=-1))
    assert (np.diff(dataset.sizes(1)[sum(whole, [])]) >= 0).all()


class Packed(Lengths):
    """Samples of one length; each says how much of it there is."""

    share = 1.0

    def __init__(self, count):
        super().__init__(count)
        self.lengths_of_samples[:] = 100

    def shortened(self, share):
        made = Packed(len(self))
        made.share = share
        return made

    def sample(self, epoch, index):
        return {"id": index, "share": self.share}


def collate_shares(samples):
    batch = collate(samples)
    batch.weights = torch.tensor([sample["share"] for sample in samples])
    return batch


def packed(world_size=1, rank=0, **options):
    given = {"batch_size": 5, "short_first": 20, **options}
    return EpochBatchIterator(Packed(403), collate_shares, seed=3, world_size=world_size, rank=rank, **given)


def share_expected(place, first=200):
    """Of the text of a sample: an eighth at the start of the epoch, all of it behind the first samples."""
    return min(1.0, 1 / 8 + 7 / 8 * place / first)


@pytest.mark.parametrize("options", [{}, {"bucket_window": 20}, {"num_workers": 1}])
def test_packed_texts_grow_in_the_curriculum_and_their_order_is_that_without(options):
    made = [packed(2, rank, **options) for rank in (0, 1)]
    rounds = list(zip(*(iterator.batches() for iterator in made), strict=True))
    seen = []
    for number, batches in enumerate(rounds):
        for batch in batches:
            assert torch.allclose(batch.weights, torch.tensor(share_expected(10 * number)))
            seen += batch.inputs["tokens"][:, 0].tolist()
    plain = packed(short_first=0)
    expected = sum(epoch_of(plain), [])
    assert seen[:200] == expected[:200]  # 20 rounds of two batches of 5
    assert sorted(seen[:403]) == sorted(expected)
    assert all((batch.weights == 1.0).all() for batch in made[0].batches())
    whole = packed(short_first=-1)
    assert [batch.weights[0].item() for batch in whole.batches()][80] == pytest.approx(share_expected(400, 403))
    for iterator in (*made, plain, whole):
        iterator.close()


@pytest.mark.parametrize("stop", [3, 11, 25])
def test_a_curriculum_of_packed_texts_is_resumed_with_other_ranks(stop):
    whole = list(packed(2).batches())
    first = packed(2)
    for _ in zip(range(stop), first.batches(), strict=False):
        pass
    same, other = packed(2), packed(3, batch_size=4)
    for iterator in (same, other):
        iterator.load_state_dict(first.state_dict())
    for batch, expected in zip(same.batches(), whole[stop:], strict=True):
        assert torch.equal(batch.weights, expected.weights)
        assert torch.equal(batch.inputs["tokens"], expected.inputs["tokens"])
    for number, batch in enumerate(other.batches()):
        assert torch.allclose(batch.weights, torch.tensor(share_expected(10 * stop + 12 * number)))


def test_long_samples_are_refused_or_dropped_and_counted(caplog):
    dataset = Lengths(300)
    long = int((dataset.sizes(1) > 80).sum())
    with pytest.raises(UserError, match="a sample can have 100 tokens"):
        iterator(dataset=dataset, max_tokens=80).batches_left()
    made = iterator(dataset=dataset, max_tokens=80, drop_long=True)
    seen = sum(epoch_of(made), [])
    assert made.dropped == long > 0
    assert sorted(seen) == np.flatnonzero(dataset.sizes(1) <= 80).tolist()
    assert f"epoch 1 leaves out {long} of 300 samples, which are longer than `max_tokens` 80" in caplog.text
    assert sum(epoch_of(iterator(dataset=dataset, max_tokens=80, drop_long=True, shuffle=False)), []) == sorted(seen)


def numbers(batch):
    """The samples of a batch that carry loss."""
    return batch.targets.tolist()


@given(
    window=st.sampled_from([0, 20, 64]),
    short_first=st.sampled_from([0, 4, -1]),
    drop_long=st.booleans(),
    batch_size=st.sampled_from([None, 4, 7]),
    max_tokens=st.sampled_from([100, 150, 300]),
    changed=st.fixed_dictionaries({}, optional={"max_tokens": st.just(170), "bucket_window": st.just(33)}),
    stop=st.integers(1, 20),
    world_size=st.integers(1, 3),
    other_world_size=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_an_epoch_is_finished_by_other_ranks_with_other_options(
    window, short_first, drop_long, batch_size, max_tokens, changed, stop, world_size, other_world_size
):
    """Each sample once and none twice, whatever has changed since the epoch began."""
    dataset = Lengths(120)
    options = {"bucket_window": window, "short_first": short_first, "drop_long": drop_long, "batch_size": batch_size}
    options["max_tokens"] = max_tokens

    def ranks(world_size, **options):
        return [iterator(dataset=dataset, rank=rank, world_size=world_size, **options) for rank in range(world_size)]

    seen, states = [], []
    for made in ranks(world_size, **options):
        batches = made.batches()
        for _ in range(min(stop, made.batches_left())):
            seen += numbers(next(batches))
        states.append(made.state_dict())
    assert all(state == states[0] for state in states)
    for made in ranks(other_world_size, **(options | changed)):
        made.load_state_dict(states[0])
        for batch in made.batches():
            seen += numbers(batch)
        assert made.state_dict() == {"epoch": 2, "samples_consumed": 0}
    assert sorted(seen) == [n for n, size in enumerate(dataset.sizes(1)) if size <= max_tokens]


def test_dropped_samples_stay_dropped_over_a_resume_with_more_room():
    dataset = Lengths(120)
    made = iterator(dataset=dataset, max_tokens=60, drop_long=True)
    seen = numbers(next(made.batches()))
    later = iterator(dataset=dataset, max_tokens=100, drop_long=True)
    later.load_state_dict(made.state_dict())
    seen += sum(epoch_of(later), [])
    assert sorted(seen) == np.flatnonzero(dataset.sizes(1) <= 60).tolist()
    assert sorted(sum(epoch_of(later), [])) == list(range(120))


@pytest.mark.parametrize("stop", [1, 9, 30])
def test_resuming_with_the_same_limits_keeps_the_batches(stop):
    whole = epoch_of(iterator(bucket_window=100, short_first=3))
    first = iterator(bucket_window=100, short_first=3)
    got = [batch.inputs["tokens"][:, 0].tolist() for _, batch in zip(range(stop), first.batches(), strict=False)]
    second = iterator(bucket_window=100, short_first=3)
    second.load_state_dict(first.state_dict())
    assert got + epoch_of(second) == whole


def test_the_state_of_a_plain_order_is_a_place_only():
    made = iterator()
    next(made.batches())
    assert set(made.state_dict()) == {"epoch", "samples_consumed"}
    made = iterator(bucket_window=10)
    assert set(made.state_dict()) == {"epoch", "samples_consumed"}
    next(made.batches())
    assert Ordering.from_dict(made.state_dict()["ordering"]).window == 10
