"""Filters, the distribution of what is drawn, and what the random numbers depend on."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from ftk.generation.search import random as sampling
from ftk.generation.search._fewest import fewest
from ftk.generation.search.random import draw, prompt_key, step_numbers, token_probabilities, uniform_numbers
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation import slow
from tests.generation.slow import SPECIAL, small_model
from tests.tiers import slow_but


def slow_filter(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0):
    """Temperature, top-k, top-p, min-p, typical, one after the other, with sorted Python lists."""
    weights = np.exp(np.asarray(logits, dtype=np.float64) / temperature)
    kept = sorted(range(len(weights)), key=lambda token: -weights[token])[: top_k or None]

    def share(token):
        return weights[token] / sum(weights[other] for other in kept)

    def until(tokens, limit):
        taken, held = [], 0.0
        for token in tokens:
            taken.append(token)
            held += share(token)
            if held >= limit:
                break
        return taken

    kept = until(kept, top_p) if top_p < 1 else kept
    kept = [token for token in kept if share(token) >= min_p * share(kept[0])]
    if typical_p < 1:
        entropy = -sum(share(token) * np.log(share(token)) for token in kept if weights[token] > 0)
        kept = [token for token in kept if weights[token] > 0]
        kept = until(sorted(kept, key=lambda token: abs(-np.log(share(token)) - entropy)), typical_p)
    result = np.zeros(len(weights))
    result[kept] = weights[kept] / weights[kept].sum()
    return result


@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("typical_p", [0.01, 0.3, 0.8, 1.0])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 12, 1.0), (1.7, 0, 0.9), (0.3, 9, 0.7), (1, 1000, 0.01)]
)
def test_the_filters_combine_as_in_the_slow_version(temperature, top_k, top_p, min_p, typical_p):
    torch.manual_seed(1)
    logits = torch.randn(4, 40) * 2
    logits[:, :5] = float("-inf")  # forbidden by a processor
    found = token_probabilities(logits, temperature, top_k, top_p, min_p, typical_p)
    for row, one in zip(found, logits, strict=True):
        expected = slow_filter(one, temperature, top_k, top_p, min_p, typical_p)
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-12)


def test_the_order_of_the_filters_is_the_stated_one():
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Top-k first: of 0.4 and 0.3 the first holds 4/7 and is enough for 0.5; top-p first would leave both.
    assert token_probabilities(shares, top_k=2, top_p=0.5).nonzero()[:, 0].tolist() == [0]
    # Temperature before min-p: 0.3 / 0.4 is 0.75, squared 0.56.
    assert token_probabilities(shares, temperature=0.5, min_p=0.6).nonzero()[:, 0].tolist() == [0]
    assert token_probabilities(shares, temperature=1.0, min_p=0.6).nonzero()[:, 0].tolist() == [0, 1]
    # Top-p before typical: of the two that are left, 4/7 and 3/7 with entropy 0.68, 0.56 is nearer than 0.85.
    assert token_probabilities(shares, top_p=0.6, typical_p=0.1).nonzero()[:, 0].tolist() == [0]
    assert token_probabilities(shares, typical_p=0.1).nonzero()[:, 0].tolist() == [1]


FILTERS = [
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"typical_p": 0.3},
    {"typical_p": 0.95},
    {"min_p": 0.2},
    {"top_p": 1 - 1e-9},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.7},
    {"top_k": 4500, "top_p": 0.9, "typical_p": 0.9},
]


def rows_of_all_kinds(size=5000):
    """Logits [6, size] whose likeliest tokens hold nearly all, much and little; in one of them many are equal."""
    logits = (
        torch.randn(6, size, generator=torch.Generator().manual_seed(4)) * torch.tensor([9, 4, 2, 1, 0.2, 3])[:, None]
    )
    logits[5] = logits[5].round()
    return logits


@pytest.mark.parametrize("size", [7, 5000])
@pytest.mark.parametrize("options", FILTERS)
def test_nothing_changes_where_all_are_sorted(options, size, monkeypatch):
    logits = rows_of_all_kinds(size)
    found = token_probabilities(logits, **options)
    for row, one in enumerate(logits):  # a row alone: the others have no say
        assert torch.equal(token_probabilities(one, **options), found[row])
    monkeypatch.setattr(sampling, "reads_are_free", lambda device: False)  # as on a GPU
    assert torch.equal(token_probabilities(logits, **options), found)


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("merits", ["equal", "far", "forbidden", "negative"])
def test_fewest_takes_merits_of_any_kind(merits, share):
    probabilities = torch.rand(3, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    probabilities /= probabilities.sum(-1, keepdim=True)
    given = {
        "equal": torch.zeros_like(probabilities),
        "far": 10.0 ** (400 * (probabilities * 300 % 1) - 300),  # some beyond float32, and all the buckets
        "forbidden": probabilities.log().masked_fill(probabilities > 0.004, -torch.inf),
        "negative": -probabilities,
    }[merits]
    found = torch.from_numpy(fewest(probabilities.numpy(), given.numpy(), share))
    order = given.sort(dim=-1, descending=True, stable=True).indices
    own = probabilities.gather(-1, order)
    expected = torch.zeros_like(own).scatter(-1, order, own.masked_fill(own.cumsum(-1) - own >= share, 0.0))
    different = (found != expected).sum(-1)
    assert int(different.max()) <= (share == 1.0)  # the sum of all may round to less or more


@pytest.mark.parametrize("size", [20, 100, 5000])
@pytest.mark.parametrize("as_bfloat16", [True, False])
def test_of_equally_likely_tokens_the_first_in_the_vocabulary_stay(size, as_bfloat16):
    if as_bfloat16:  # rounded as the logits of such a model are
        logits = 20 + torch.randn(3, size, generator=torch.Generator().manual_seed(size))
        logits = logits.bfloat16().float()
        assert logits.unique().numel() < logits.numel()
    else:
        logits = torch.zeros(3, size)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 3, 8, size // 2):
        kept = token_probabilities(logits, top_k=count) > 0
        for row in range(3):
            assert set(kept[row].nonzero()[:, 0].tolist()) == set(order[row, :count].tolist())
    for options in ({"top_p": 0.3}, {"top_p": 0.8}):
        kept = token_probabilities(logits, **options) > 0
        for row in range(3):
            count = int(kept[row].sum())
            assert set(kept[row].nonzero()[:, 0].tolist()) == set(order[row, :count].tolist())
    if not as_bfloat16:  # all are equally typical, too
        kept = token_probabilities(logits, typical_p=0.25) > 0
        assert kept.sum(-1).tolist() == [size // 4] * 3
        assert bool(kept[:, : size // 4].all())


def test_draw_takes_the_token_whose_share_holds_the_number():
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    for uniform, token in ((0.0, 1), (0.249, 1), (0.25, 3), (0.9999999999999999, 3)):
        assert draw(probabilities, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


DRAWN = [
    {},
    {"temperature": 1.6},
    {"top_k": 6},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.7},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.85},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9},
]


def chi_square(counts, probabilities, draws):
    """Statistic and degrees of freedom over the tokens that are expected at least five times."""
    expected = probabilities * draws
    often = expected >= 5
    statistic = float(((counts[often] - expected[often]) ** 2 / expected[often]).sum())
    rest = expected[~often].sum()
    if rest > 0:
        statistic += float((counts[~often].sum() - rest) ** 2 / rest)
    return statistic, int(often.sum()) + (rest > 0) - 1


def assert_plausible(counts, probabilities, draws):
    statistic, freedom = chi_square(counts, probabilities, draws)
    # Wilson-Hilferty: this bound is passed by chance once in some 30,000 times.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert counts[probabilities == 0].sum() == 0


@pytest.mark.parametrize("options", slow_but([DRAWN[0], DRAWN[-1]], DRAWN))
def test_first_tokens_are_distributed_as_the_model_says(options):
    model, context, draws = small_model(seed=2), [7, 8, 3, 9], 4000
    with torch.no_grad():
        model.token_embedding.weight.mul_(0.3)  # flatter, so that many tokens have a chance
    generator = BlankGenerator(model, SPECIAL, max_len=1, sampling=True, batch_size=500, **options)
    answers = generator.fill_ids([context] * draws, seeds=range(draws))
    counts = Counter((answer.tokens or [SPECIAL.eop])[0] for (answer,) in answers)
    logits = slow.next_logprobs(model, context, [], 2, [])
    probabilities = slow_filter(logits, **options)
    assert (probabilities > 0).sum() > 2
    assert_plausible(np.array([counts[token] for token in range(20)]), probabilities, draws)


def test_tokens_behind_the_first_are_distributed_as_the_model_says():
    model, context, draws = small_model(seed=4), [7, 3, 9], 6000
    with torch.no_grad():
        model.token_embedding.weight.mul_(0.3)
    generator = BlankGenerator(model, SPECIAL, max_len=2, min_len=2, sampling=True, top_k=3, batch_size=500)
    answers = generator.fill_ids([context] * draws, seeds=range(draws))
    counts = Counter(tuple(answer.tokens) for (answer,) in answers)
    probabilities = {}
    for first, share in enumerate(without_end(model, context, [])):
        if share > 0:
            for second, next_share in enumerate(without_end(model, context, [first])):
                probabilities[first, second] = share * next_share
    pairs = sorted(set(probabilities) | set(counts))
    assert_plausible(
        np.array([counts[pair] for pair in pairs]),
        np.array([probabilities.get(pair, 0.0) for pair in pairs]),
        draws,
    )


def without_end(model, context, answer):
    logits = slow.next_logprobs(model, context, [], context.index(3), answer)
    logits[SPECIAL.eop] = float("-inf")
    return slow_filter(logits, 1.0, 3, 1.0)


def test_samples_depend_on_prompt_and_seed_and_nothing_else():
    generator = BlankGenerator(small_model(), SPECIAL, max_len=6, sampling=True, temperature=2.0, seed=3)
    alone = generator.fill_ids([[7, 3, 8]])[0]
    among = generator.fill_ids([[9, 3], [7, 3, 8], [3, 3, 3], [10, 11, 12, 3]])[1]
    again = generator.fill_ids([[7, 3, 8]], seeds=[3])[0]
    assert [a.tokens for a in alone] == [a.tokens for a in among] == [a.tokens for a in again]
    others = generator.fill_ids([[7, 3, 8]] * 10, seeds=range(10, 20))
    assert any(row[0].tokens != alone[0].tokens for row in others)


def test_two_blanks_of_one_prompt_have_different_numbers():
    keys = [prompt_key(1, [7, 3, 3]), prompt_key(2, [7, 3, 3]), prompt_key(1, [7, 3])]
    numbers = np.concatenate([uniform_numbers(keys, stream, 50) for stream in range(3)])
    assert len(np.unique(numbers)) == numbers.size


def test_uniform_numbers_are_uniform_and_independent():
    numbers = uniform_numbers([prompt_key(seed, [5]) for seed in range(500)], 0, 40)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    assert_plausible(counts, np.full(64, 1 / 64), numbers.size)
    pairs = np.histogram2d(numbers[:, :-1].ravel(), numbers[:, 1:].ravel(), bins=8, range=((0, 1), (0, 1)))[0]
    assert_plausible(pairs.ravel(), np.full(64, 1 / 64), pairs.sum())
    draws = step_numbers([prompt_key(seed, [5]) for seed in range(2000)], 1, 3, 4)
    assert len(np.unique(draws)) == draws.size
    np.testing.assert_array_equal(draws[:, :, 0], uniform_numbers([prompt_key(s, [5]) for s in range(2000)], 1, 3))
    pairs = np.histogram2d(draws[:, :, 1].ravel(), draws[:, :, 2].ravel(), bins=8, range=((0, 1), (0, 1)))[0]
    assert_plausible(pairs.ravel(), np.full(64, 1 / 64), pairs.sum())


def test_n_best_samples_are_independent_ones_of_which_the_first_is_the_one_sample():
    model, contexts = small_model(seed=2), [[7, 3, 8], [9, 3]]
    one = BlankGenerator(model, SPECIAL, max_len=5, sampling=True, temperature=2.0)
    many = BlankGenerator(model, SPECIAL, max_len=5, sampling=True, temperature=2.0, nbest=6)
    for row, (best,) in zip(one.fill_ids(contexts), many.fill_ids(contexts), strict=True):
        answers = [best, *best.others]
        assert len(answers) == 6
        assert [a.score for a in answers] == sorted((a.score for a in answers), reverse=True)
        assert row[0].tokens in [answer.tokens for answer in answers]
        assert len({tuple(answer.tokens) for answer in answers}) > 2
    # Pairs of two samples of one prompt: as often as two independent draws would give them.
    draws, context = 4000, [7, 8, 3, 9]
    with torch.no_grad():
        model.token_embedding.weight.mul_(0.3)
    pairs = BlankGenerator(model, SPECIAL, max_len=1, sampling=True, top_k=3, nbest=2, batch_size=500)
    found = Counter(
        frozenset(((a.tokens or [SPECIAL.eop])[0], (a.others[0].tokens or [SPECIAL.eop])[0]))
        for (a,) in pairs.fill_ids([context] * draws, seeds=range(draws))
    )
    shares = slow_filter(slow.next_logprobs(model, context, [], 2, []), top_k=3)
    words = np.flatnonzero(shares)
    expected = {frozenset((a, b)): shares[a] * shares[b] * (1 if a == b else 2) for a in words for b in words}
    keys = list(expected)
    assert_plausible(np.array([found[key] for key in keys]), np.array([expected[key] for key in keys]), draws)
