"""Samples of span corruption against texts cut slowly, lengths against T5's, and shares against their expectation."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from ftk.data.batches.collate import Collater
from ftk.data.corpora.documents import DocumentList
from ftk.data.random import SampleRandom
from ftk.errors import UserError
from ftk.tasks.span_corruption.samples import _SPANS, Counts, SpanCorruptionDataset, sentinels_of, text_length
from ftk.tasks.span_corruption.task import SpanCorruptionConfig, SpanCorruptionTask
from ftk.tokenizers import SpecialTokens

PAD, END, FIRST_SENTINEL, VOCAB_SIZE = 0, 1, 199, 200
SENTINELS = np.arange(FIRST_SENTINEL, 149, -1)
RANDOM = np.random.default_rng(1)
DOCUMENTS = [RANDOM.integers(2, 150, size).tolist() for size in (3, 1, 0, 200, 57, 12, 700, 2)]


def dataset(documents: list = DOCUMENTS, before: Sequence[int] = (), **options: object) -> SpanCorruptionDataset:
    config = SpanCorruptionConfig(**{"seq_length": 60, **options})  # type: ignore[arg-type]
    return SpanCorruptionDataset(DocumentList(documents), VOCAB_SIZE, SENTINELS, PAD, END, PAD, config, 5, before)


def slowly_counted(length: int, density: float = 0.15, mean: float = 3.0) -> tuple[int, int]:
    """How many tokens are hidden, in how many spans."""
    if length < 2:
        return 0, 0
    hidden = min(max(round(length * density), 1), length - 1)
    return hidden, min(max(round(hidden / mean), 1), length - hidden)


def slowly_parted(random: SampleRandom, total: int, parts: int) -> list[int]:
    """`total` as a sum of positive numbers: `parts` - 1 of the places between two of its units are drawn."""
    chosen: set[int] = set()
    for last in range(total - parts, total - 1):  # Floyd's way
        place = random.below(last + 1)
        chosen.add(last if place in chosen else place)
    cuts = [-1, *sorted(chosen), total - 1]
    return [stop - start for start, stop in itertools.pairwise(cuts)]


def slowly_corrupted(text: list[int], random: SampleRandom, **shape: float) -> tuple[list[int], list[int]]:
    """Source and target."""
    hidden, spans = slowly_counted(len(text), **shape)
    source, target, rest = [], [], list(text)
    if spans:
        noise = slowly_parted(random, hidden, spans)
        kept = slowly_parted(random, len(text) - hidden, spans)
        for number, (keep, hide) in enumerate(zip(kept, noise, strict=True)):
            source += [*rest[:keep], FIRST_SENTINEL - number]
            target += [FIRST_SENTINEL - number, *rest[keep : keep + hide]]
            rest = rest[keep + hide :]
    return [*source, *rest, END], [*target, END]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seq_length": 4},
        {"seq_length": 7},
        {"noise_density": 0.5, "mean_span_length": 1.0},
        {"noise_density": 0.9},
        {"before": [7, 8]},
    ],
)
def test_samples_are_those_of_the_slow_way(options: dict) -> None:
    data = dataset(**options)
    shape = {"density": data.config.noise_density, "mean": data.config.mean_span_length}
    for epoch in (1, 2):
        many = data.samples(epoch, np.arange(len(data)))
        for index in range(len(data)):
            texts, _, _ = data.texts.pieces(epoch, np.array([index]), PAD)
            random = SampleRandom(data.seed + _SPANS, epoch, index)
            source, target = slowly_corrupted(texts[0].tolist(), random, **shape)
            source = [*options.get("before", ()), *source]
            sample = many[index]
            assert sample["tokens"].tolist() == source
            assert sample["targets"].tolist() == target
            assert sample["decoder_tokens"].tolist() == [PAD, *target[:-1]]
            assert sample["loss_mask"].all()
            assert len(sample["loss_mask"]) == len(target)
            assert sample["lengths"] == len(source)
            assert max(len(source), len(target)) <= data.sizes(epoch)[index]
            assert len(source) <= SpanCorruptionTask.longest(data.config)[0]
            alone = data.sample(epoch, index)
            assert alone.keys() == sample.keys()
            assert all(np.array_equal(alone[name], sample[name]) for name in sample)


def test_lengths_are_those_of_t5() -> None:
    assert text_length(512, 0.15, 3.0) == 568
    assert [int(count) for count in Counts.of(np.array(568), 0.15, 3.0)] == [85, 28, 512, 114]
    every = np.arange(3000)
    counts = Counts.of(every, 0.15, 3.0)
    assert [*zip(counts.hidden.tolist(), counts.spans.tolist(), strict=True)] == [*map(slowly_counted, every.tolist())]
    assert (np.diff(counts.source[1:]) >= 0).all()  # which the search for the longest text needs
    assert all(
        text_length(length, 0.15, 3.0) == np.flatnonzero(counts.source <= length)[-1] for length in range(4, 2000, 7)
    )


def test_all_ways_to_part_a_number_are_alike() -> None:
    """Of 20 texts cut in 3: 10 ways to part 6 hidden tokens, 78 to part 14 kept ones; 12,000 draws."""
    data = dataset(
        [RANDOM.integers(2, 150, 20 * 3000 - 1).tolist()], seq_length=18, noise_density=0.3, mean_span_length=2
    )
    assert data.texts.length == 20
    hidden, kept = Counter(), Counter()
    for epoch in range(4):
        made = data.samples(epoch, np.arange(len(data)))
        for row in range(len(made)):
            sample = made[row]
            for counter, name in ((kept, "tokens"), (hidden, "targets")):
                places = np.flatnonzero(sample[name] >= 150)
                bounds = np.append(places, len(sample[name]) - 1) if name == "targets" else np.append(-1, places)
                counter[tuple(np.diff(bounds) - 1)] += 1
    for counter, ways in ((hidden, 10), (kept, 78)):
        draws = sum(counter.values())
        assert len(counter) == ways
        assert draws == 12_000
        chi = sum((count - draws / ways) ** 2 for count in counter.values()) / (draws / ways)
        assert chi < ways - 1 + 4 * (2 * (ways - 1)) ** 0.5


def test_batches_pad_sources_and_targets_apart() -> None:
    data = dataset()
    rows = np.array([0, len(data) - 1, 1])  # the last text is shorter
    together = data.samples(1, rows)
    collate = Collater(SpecialTokens(pad=PAD))
    batch, again = collate(together), collate(list(together))
    for name in ("tokens", "lengths", "decoder_tokens"):
        assert np.array_equal(batch.inputs[name], again.inputs[name])
    assert np.array_equal(batch.places, again.places)
    width = batch.inputs["decoder_tokens"].shape[1]
    assert width < batch.inputs["tokens"].shape[1]
    joined = np.concatenate([sample["targets"] for sample in together])
    assert batch.targets.tolist() == joined.tolist()
    assert (batch.places // width).tolist() == np.repeat(range(3), [len(each["targets"]) for each in together]).tolist()
    assert [len(each["tokens"]) for each in together] == batch.inputs["lengths"].tolist()


def test_a_curriculum_begins_with_the_same_shorter_texts() -> None:
    data = dataset()
    short = data.shortened(0.5)
    assert short.texts.pieces(1, np.array([0]), PAD)[2] < data.texts.pieces(1, np.array([0]), PAD)[2]
    assert len(short.sample(1, 0)["tokens"]) < len(data.sample(1, 0)["tokens"])


def test_too_few_sentinels_are_refused() -> None:
    with pytest.raises(UserError, match="`seq_length` 1000 gives 55 spans, but the tokenizer has 50 sentinels"):
        dataset(seq_length=1000)


class Pieces:
    """A tokenizer whose sentinels are pieces of its vocabulary, as mT5's."""

    name, vocab_size, command_tokens = "pieces", 40, ()

    def token_text(self, token: int) -> str:
        return f"▁<extra_id_{39 - token}>" if token >= 30 else f"▁{token}"


def test_sentinels_are_found_among_the_pieces_too() -> None:
    assert sentinels_of(Pieces()).tolist() == list(range(39, 29, -1))  # type: ignore[arg-type]
    Pieces.vocab_size = 30
    with pytest.raises(UserError, match="has no sentinels .*with_sentinels"):
        sentinels_of(Pieces())  # type: ignore[arg-type]
