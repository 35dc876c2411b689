"""Validation on a blend: which samples are taken, and the corpus that each is counted for."""

from __future__ import annotations

import pytest

from ftk.data.batches.iterator import EpochBatchIterator
from ftk.data.corpora.blending import BlendedDataset, Part
from ftk.trainer.dataloading import SomeSamples
from ftk.trainer.validation import batches_by_corpus
from tests.trainer.toy import ToyDataset, collate


def blend(*counts: int, names: tuple[str, ...] = ("x/a", "x/b", "x/c")) -> BlendedDataset:
    parts = [Part(name, count, ToyDataset(count, 1)) for name, count in zip(names, counts, strict=False)]
    return BlendedDataset(parts, [1.0] * len(parts), 1)


@pytest.mark.parametrize(
    ("counts", "limit", "taken"),
    [
        ((6, 3), 3, [0, 1, 6]),
        ((6, 3), 6, [0, 1, 2, 3, 6, 7]),
        ((6, 3), 100, range(9)),
        ((98, 1, 1), 3, [0, 98, 99]),
        ((1, 98, 1), 5, [0, 1, 2, 3, 99]),
        ((5, 5, 5), 2, [5, 10]),
    ],
)
def test_each_corpus_gives_its_share_of_a_limited_validation(counts, limit, taken) -> None:
    dataset = SomeSamples(blend(*counts), limit)
    assert dataset.indices.tolist() == [*taken]
    assert len(dataset) == len(dataset.sizes(1)) == len(taken)
    iterator = EpochBatchIterator(dataset, collate, batch_size=4, shuffle=False)
    found = {"a": 0, "b": 0, "c": 0}
    for batch in batches_by_corpus(iterator):
        group = batch.groups["corpus"]
        rows = (batch.places // batch.placed_tokens.shape[1]).tolist()
        for row in range(len(batch.sample_ids)):
            found[group.names[group.index[rows.index(row)]].removeprefix("corpus_")] += 1
    starts = [sum(counts[:number]) for number in range(len(counts))]
    expected = [sum(start <= one < start + count for one in taken) for start, count in zip(starts, counts, strict=True)]
    assert [found[name] for name in "abc"[: len(counts)]] == expected


def test_one_corpus_gives_its_first_samples() -> None:
    dataset = SomeSamples(ToyDataset(9, 1), 4)
    assert dataset.indices.tolist() == [0, 1, 2, 3]
    assert len(SomeSamples(ToyDataset(9, 1), 40)) == 9


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["d/a", "d/b"], ["a", "b"]),
        ([".", "../other"], ["here", "other"]),
        (["d/a1:d/a2", "d/b"], ["a1:a2", "b"]),
        (["d/c:d", "d/b"], ["c:d", "b"]),
        (["d/a", "e/a"], ["d/a", "e/a"]),
        (["d/a", "d/a/", "./d/a"], ["a", "a", "a"]),
        (["/", "d/a"], ["/", "d/a"]),
    ],
)
def test_corpora_are_named_by_the_last_part_of_their_paths(paths, names, tmp_path, monkeypatch) -> None:
    (tmp_path / "here" / "d" / "c:d").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    iterator = EpochBatchIterator(blend(*[4] * len(paths), names=tuple(paths)), collate, batch_size=2, shuffle=False)
    groups = [batch.groups["corpus"] for batch in batches_by_corpus(iterator)]
    assert groups[0].names == tuple(f"corpus_{name}" for name in dict.fromkeys(names))
    found = [group.names[int(group.index[0])].removeprefix("corpus_") for group in groups[::2]]
    assert found == names
