"""The epoch iterator: every sample once, resume anywhere, any number of workers and ranks."""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from number_corpus import NumberTokenizer, random_documents

from ftk.data.batches.collate import Collater
from ftk.data.batches.iterator import EpochBatchIterator
from ftk.errors import UserError
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset
from tests.data.numbers_dataset import COLLATER, Numbers, equal_batches, iterator, workers_end_with_their_test  # noqa: F401


def numbers(batch):
    """The samples of a batch that carry loss."""
    return batch.inputs["tokens"][:, 0].tolist() if len(batch.targets) else []


def epoch_of(made):
    return [numbers(batch) for batch in made.batches()]


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own():
    made = iterator()
    first, second = epoch_of(made), epoch_of(made)
    assert made.epoch == 3
    assert [len(batch) for batch in first] == [6] * 6 + [4]
    flat = [sum(epoch, []) for epoch in (first, second)]
    assert sorted(flat[0]) == sorted(flat[1]) == list(range(40))
    assert flat[0] != flat[1]
    assert sum(epoch_of(iterator(seed=4)), []) != flat[0]
    assert epoch_of(iterator()) == first


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_names_its_samples(num_workers):
    made = iterator(20, num_workers=num_workers)
    for _ in range(2):
        for batch in made.batches():
            assert batch.sample_ids.dtype == np.int64
            assert batch.sample_ids.tolist() == batch.inputs["tokens"][:, 0].tolist()
    filler = next(iter(iterator(2, rank=3, world_size=4, batch_size=3).batches()))
    assert filler.sample_ids.tolist() == filler.inputs["tokens"][:, 0].tolist()


def test_without_shuffling_the_order_is_the_datas():
    assert sum(epoch_of(iterator(shuffle=False)), []) == list(range(40))


def test_the_epoch_reaches_the_samples():
    made = iterator()
    for epoch in (1, 2):
        batch = next(iter(made.batches()))
        assert batch.targets[0] - batch.inputs["tokens"][0, 0] == 1000 * epoch
        for _ in made.batches():
            pass


def test_the_state_counts_what_was_handed_out():
    made = iterator()
    batches = made.batches()
    assert made.state_dict() == {"epoch": 1, "samples_consumed": 0}
    next(batches)
    next(batches)
    assert made.state_dict() == {"epoch": 1, "samples_consumed": 12}
    assert made.batches_left() == 5
    for _ in batches:
        pass
    assert made.state_dict() == {"epoch": 2, "samples_consumed": 0}
    assert made.batches_left() == 7


@given(
    count=st.integers(1, 60),
    stop=st.integers(0, 30),
    limits=st.sampled_from([(6, None), (None, 40), (4, 40)]),
    multiple=st.sampled_from([1, 4]),
    world_size=st.integers(1, 5),
    other_world_size=st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_ranks_share_an_epoch_and_others_may_finish_it(count, stop, limits, multiple, world_size, other_world_size):
    """Stop all ranks after some batches; ranks of another number hand out exactly the rest."""
    options = {"batch_size": limits[0], "max_tokens": limits[1], "required_batch_size_multiple": multiple}
    ranks = [iterator(count, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    assert len({made.batches_left() for made in ranks}) == 1
    seen = []
    for made in ranks:
        expected = made.batches_left()
        for number, batch in enumerate(made.batches(), start=1):
            assert batch.num_tokens <= (limits[1] or 10**6)
            seen += numbers(batch)
            assert made.batches_left() == expected - number
            if number >= stop:
                break
    states = [made.state_dict() for made in ranks]
    assert all(state == states[0] for state in states)
    if states[0]["epoch"] == 1:
        for rank in range(other_world_size):
            made = iterator(count, rank=rank, world_size=other_world_size, **options)
            made.load_state_dict(states[0])
            for batch in made.batches():
                seen += numbers(batch)
            assert made.state_dict() == {"epoch": 2, "samples_consumed": 0}
    assert sorted(seen) == list(range(count))


def test_a_rank_without_samples_gets_a_batch_without_loss():
    ranks = [iterator(5, rank=rank, world_size=4, batch_size=3) for rank in range(4)]
    batches = [list(made.batches()) for made in ranks]
    assert [len(of_rank) for of_rank in batches] == [1] * 4
    assert sorted(len(numbers(of_rank[0])) for of_rank in batches) == [1, 1, 1, 2]
    ranks = [iterator(2, rank=rank, world_size=4, batch_size=3) for rank in range(4)]
    batches = [list(made.batches()) for made in ranks]
    assert [len(numbers(of_rank[0])) for of_rank in batches] == [1, 1, 0, 0]
    assert all(len(of_rank[0].inputs["tokens"]) == 1 for of_rank in batches)


def glm_iterator(num_workers=0, **options):
    tokenizer = NumberTokenizer()
    config = BlankInfillingConfig(seq_length=32, short_seq_prob=0.2)
    dataset = GLMBlankDataset(random_documents([20, 50, 7, 300] * 10), tokenizer, config, 1)
    return EpochBatchIterator(
        dataset, Collater(tokenizer.special), seed=5, num_workers=num_workers, **{"batch_size": 8, **options}
    )


@pytest.mark.parametrize(("first_workers", "second_workers"), [(0, 2), (2, 0), (1, 2)])
@pytest.mark.parametrize("stop", [1, 4, 15])
def test_a_resumed_iterator_hands_out_exactly_the_rest(first_workers, second_workers, stop):
    """Two epochs without a break, against a stop in the middle and another iterator with other workers."""
    whole = glm_iterator()
    expected = [*whole.batches(), *whole.batches()]
    first = glm_iterator(first_workers)
    got = []
    for batch in first.batches():
        got.append(batch)
        if len(got) == stop:
            break
    second = glm_iterator(second_workers)
    second.load_state_dict(first.state_dict())
    got += second.batches()
    if second.epoch == 2:
        got += second.batches()
    assert 12 < len(expected) // 2 < 16
    assert equal_batches(got, expected)


def test_breaking_off_and_going_on_with_workers_loses_nothing():
    whole = list(glm_iterator().batches())
    made = glm_iterator(2)
    got = []
    while made.epoch == 1:
        for batch in made.batches():
            got.append(batch)
            if len(got) % 3 == 0:
                break
    assert equal_batches(got, whole)


def test_a_closed_iterator_has_no_workers_and_begins_with_new_ones():
    made, expected = iterator(num_workers=2), iterator(num_workers=0)
    others = set(multiprocessing.active_children())  # of earlier tests
    batches = made.batches()
    first = [numbers(next(batches)), numbers(next(batches))]
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    made.close()
    assert not workers & set(multiprocessing.active_children())
    assert {worker.exitcode for worker in workers} == {0}  # told to end, not killed
    assert first + [numbers(batch) for batch in made.batches()] == [numbers(batch) for batch in expected.batches()]
    made.close()
    expected.close()


def test_iterating_leaves_torchs_random_state_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for workers in (0, 1):
        next(iter(glm_iterator(workers).batches()))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_place_beyond_the_data_is_refused():
    with pytest.raises(UserError, match="has the data changed"):
        iterator(10).load_state_dict({"epoch": 1, "samples_consumed": 11})
