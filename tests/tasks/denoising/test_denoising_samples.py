"""Samples of denoising against noise made slowly, and shares against their expectation."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest

from ftk.data.corpora.documents import DocumentList
from ftk.data.random import SampleRandom
from ftk.tasks.denoising.samples import _NOISE, DenoisingDataset, span_lengths
from ftk.tasks.denoising.task import DenoisingConfig
from ftk.tasks.pieces import BEGINS, CONTINUES, Tokens

FIRST, LAST, MASK, PAD, VOCAB_SIZE = 90, 91, 92, 93, 94
STOPS = (7, 8)
RANDOM = np.random.default_rng(1)
DOCUMENTS = [RANDOM.integers(0, 90, size).tolist() for size in (3, 1, 0, 200, 57, 12, 700, 2)]


def dataset(documents: list = DOCUMENTS, *, seed: int = 5, **options: object) -> DenoisingDataset:
    config = DenoisingConfig(**{"seq_length": 40, **options})  # type: ignore[arg-type]
    kind = np.full(VOCAB_SIZE, BEGINS, dtype=np.uint8)
    if config.mask_length != "subword":
        kind[31:90:2] = CONTINUES  # odd tokens from 31 on
    ends = np.zeros(VOCAB_SIZE, dtype=np.bool_)
    ends[[*STOPS]] = True
    tokens = Tokens(FIRST, LAST, MASK, PAD, kind, np.arange(90))
    return DenoisingDataset(DocumentList(documents), tokens, ends, LAST, config, seed)


def slowly_permuted(text: list[int], random: SampleRandom, share: float) -> list[int]:
    inner, sentences = text[1:-1], [[]]
    stops = (*STOPS, LAST)
    for number, token in enumerate(inner):
        sentences[-1].append(token)
        if token in stops and number + 1 < len(inner) and inner[number + 1] not in stops:
            sentences.append([])
    if len(sentences) < 2:
        return text
    chosen = random.permutation(len(sentences))[: ceil(share * len(sentences))].tolist()
    moved = dict(zip(sorted(chosen), chosen, strict=True))
    order = [moved.get(number, number) for number in range(len(sentences))]
    return [text[0], *(token for number in order for token in sentences[number]), text[-1]]


def slowly_masked(random: SampleRandom, share: float) -> int:
    if share and random.uniform() < share:
        return random.below(90)
    return MASK


def slowly_inserted(text: list[int], count: int, random: SampleRandom, share: float) -> list[int]:
    if count < 1:
        return text
    places = len(text) + count - 2
    chosen: set[int] = set()
    for last in range(places - count, places):  # Floyd's way
        place = random.below(last + 1)
        chosen.add(last if place in chosen else place)
    rest = text[1:-1]
    inner = [slowly_masked(random, share) if place in chosen else rest.pop(0) for place in range(places)]
    return [text[0], *inner, text[-1]]


def slowly_noisy(data: DenoisingDataset, text: list[int], epoch: int, index: int) -> list[int]:
    config, kind = data.config, data.tokens.kind
    random = SampleRandom(data.seed + _NOISE, epoch, index)
    size = len(text)
    if config.permute_sentences:
        text = slowly_permuted(text, random, config.permute_sentences)
    if config.mask_ratio:
        words: list[list[int]] = []
        for place in range(1, len(text) - 1):
            if place == 1 or kind[text[place]] != CONTINUES:
                words.append([])
            words[-1].append(place)
        budget = ceil(config.mask_ratio * len(words))
        lengths: list[int] = []
        while sum(lengths) < budget:
            drawn = 1
            if config.mask_length == "span-poisson":
                drawn = int(np.searchsorted(data.span_lengths, random.uniform(), side="right"))
            lengths.append(min(drawn, budget - sum(lengths)))
        spans = [length for length in lengths if length]
        starts = list(range(len(words)))
        done: dict[int, str] = {}
        for number, length in enumerate(spans):
            other = number + random.below(len(words) - number)
            starts[number], starts[other] = starts[other], starts[number]
            covered = [place for word in words[starts[number] : starts[number] + length] for place in word]
            first, rest = covered[0], covered[1:]
            if config.replace_length == -1:
                done |= dict.fromkeys(covered, "masked")
            elif config.replace_length == 0:
                done |= dict.fromkeys(covered, "deleted")
            else:
                done = {first: "masked"} | done | dict.fromkeys(rest, "deleted")
        found = []
        for place, token in enumerate(text):
            if done.get(place) == "masked":
                found.append(slowly_masked(random, config.mask_random))
            elif place not in done:
                found.append(token)
        inserts = min(len(lengths) - len(spans), size - len(found))
        text = slowly_inserted(found, inserts, random, config.mask_random)
    if config.insert:
        text = slowly_inserted(text, ceil(config.insert * len(text)), random, config.mask_random)
    if config.rotate and random.uniform() < config.rotate:
        offset, inner = random.below(max(1, len(text) - 1)), text[1:-1]
        offset %= max(1, len(inner))
        text = [text[0], *inner[offset:], *inner[:offset], text[-1]]
    return text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seq_length": 3},
        {"mask_length": "word", "mask_random": 0.3},
        {"mask_length": "subword", "replace_length": 0, "permute_sentences": 0.0},
        {"replace_length": -1, "mask_random": 0.5, "permute_sentences": 0.5},
        {"mask_ratio": 0.0, "insert": 0.2, "rotate": 0.7},
        {"mask_ratio": 0.9, "insert": 0.5, "rotate": 1.0, "mask_random": 1.0, "poisson_lambda": 1.0},
        {"mask_ratio": 1.0, "poisson_lambda": 0.1},
    ],
)
def test_samples_are_those_of_the_slow_way(options: dict) -> None:
    data = dataset(**options)
    for epoch in (1, 2):
        many = data.samples(epoch, np.arange(len(data)))
        for index in range(len(data)):
            (text,) = data.texts.texts(epoch, np.array([index]))
            whole = text["tokens"].tolist()
            sample = many[index]
            assert sample["tokens"].tolist() == slowly_noisy(data, whole, epoch, index)
            assert sample["targets"].tolist() == whole
            assert sample["decoder_tokens"].tolist() == [LAST, *whole[:-1]]
            assert sample["lengths"] == len(sample["tokens"]) <= data.sizes(epoch)[index]
            alone = data.sample(epoch, index)
            assert all(np.array_equal(alone[name], sample[name]) for name in sample)


def test_shares_are_those_of_the_options() -> None:
    """Over 10,000 texts of 38 words, apart from one another: spans, their lengths, and masks that stand for none."""
    inner = [token for token in range(90) if token not in STOPS]
    documents = [RANDOM.choice(inner, 37).tolist() for _ in range(2500)]
    data = dataset(documents, mask_length="span-poisson", permute_sentences=0.0)
    data.tokens.kind[:] = BEGINS
    budget = ceil(0.3 * 38)
    covered = masks = texts = 0
    for epoch in range(4):
        made = data.samples(epoch, np.arange(len(data)))
        lengths = made.arrays["lengths"]
        inserted = (made.arrays["tokens"] == MASK).sum(axis=1)
        texts += len(lengths)
        masks += int(inserted.sum())
        covered += int((40 - (lengths - inserted)).sum())
    assert texts == 10_000
    # Spans that overlap cover less than the budget: each word is outside of all with about the same chance.
    draws = np.random.default_rng(2)
    simulated_masks, simulated = [], []
    for _ in range(10_000):
        drawn: list[int] = []
        while sum(drawn) < budget:
            drawn.append(min(int(draws.poisson(3.0)), budget - sum(drawn)))
        spans = [length for length in drawn if length]
        starts = draws.permutation(38)[: len(spans)]
        hidden = {place for start, length in zip(starts, spans, strict=True) for place in range(start, start + length)}
        hidden -= set(range(38, 50))
        inside = {
            place for start, length in zip(starts, spans, strict=True) for place in range(start + 1, start + length)
        }
        simulated.append(len(hidden))
        simulated_masks.append(len(drawn) - len(spans) + len(set(starts.tolist()) - inside))
    assert covered / texts == pytest.approx(np.mean(simulated), rel=0.01)
    assert masks / texts == pytest.approx(np.mean(simulated_masks), rel=0.02)


def test_spans_have_the_lengths_of_poissons_distribution() -> None:
    shares = np.diff(span_lengths(3.0), prepend=0.0)
    assert shares[:4] == pytest.approx([0.049787, 0.149361, 0.224042, 0.224042], abs=1e-6)
    assert (shares * np.arange(len(shares))).sum() == pytest.approx(3.0)


def test_all_orders_of_sentences_are_alike() -> None:
    """Texts of three sentences, 12,000 draws: all six orders, or with half of the sentences two that change places."""
    text = [1, 7, 2, 7, 8, 3]  # two stops in a row end one sentence
    for share, allowed in ((1.0, 6), (0.5, 4)):
        data = dataset([text] * 3000, seq_length=9, mask_ratio=0.0, permute_sentences=share)
        total = data.texts.ring.reader.total
        # Epochs that begin at the beginning of a document, so that each sample is one.
        epochs = [epoch for epoch in range(200) if SampleRandom(data.seed, epoch, 0).below(total) % 7 == 0][:4]
        counts: dict[tuple[int, ...], int] = {}
        for epoch in epochs:
            made = data.samples(epoch, np.arange(len(data)))
            assert (made.arrays["targets"][:, 1:7] == text).all()
            for source in made.arrays["tokens"].tolist():
                order = tuple(token for token in source if token in (1, 2, 3))
                counts[order] = counts.get(order, 0) + 1
        assert sum(counts.values()) == 12_000
        assert len(counts) == allowed
        for order, count in counts.items():
            # Of two chosen sentences one half of the time neither moves; each of the three pairs moves alike.
            wanted = 1 / 2 if share == 0.5 and order == (1, 2, 3) else 1 / 6
            assert count / 12_000 == pytest.approx(wanted, abs=0.02)
