"""Filters, the distribution of what is drawn, and what the random numbers depend on."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from ftk.generation import SequenceGenerator
from ftk.generation.sampling import draw, prompt_key, token_probabilities, uniform_numbers
from tests.generation import slow
from tests.generation.slow import SPECIAL, small_model

LOGITS = torch.tensor([0.5, 0.1, 0.25, 0.05, 0.1]).log()


def slow_filter(logits, temperature, top_k, top_p):
    """Temperature, then top-k, then top-p, with a sorted Python list."""
    weights = np.exp(np.asarray(logits, dtype=np.float64) / temperature)
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])
    ranked = ranked[: top_k or None]
    total, kept, held = sum(weights[token] for token in ranked), [], 0.0
    for token in ranked:
        kept.append(token)
        held += weights[token] / total
        if held >= top_p:
            break
    result = np.zeros(len(weights))
    result[kept] = weights[kept] / weights[kept].sum()
    return result


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 2, 7, 40, 1000])
@pytest.mark.parametrize("top_p", [0.01, 0.4, 0.9, 1.0])
def test_filters_combine_as_in_the_slow_version(temperature, top_k, top_p):
    torch.manual_seed(0)
    logits = torch.randn(3, 40)
    found = token_probabilities(logits, temperature, top_k, top_p)
    for row, one in zip(found, logits, strict=True):
        np.testing.assert_allclose(row, slow_filter(one, temperature, top_k, top_p), rtol=0, atol=1e-12)


def test_top_p_works_without_top_k_and_top_k_lets_no_tie_pass():
    assert token_probabilities(LOGITS, 1.0, 0, 0.7).nonzero()[:, 0].tolist() == [0, 2]
    assert (token_probabilities(torch.zeros(6), 1.0, 3, 1.0) > 0).sum() == 3


def test_draw_takes_the_token_whose_share_holds_the_number():
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    for uniform, token in ((0.0, 1), (0.249, 1), (0.25, 3), (0.9999999999999999, 3)):
        assert draw(probabilities, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


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


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (1.6, 0, 1.0), (1.0, 6, 1.0), (1.0, 0, 0.8), (1.3, 9, 0.85)],
)
def test_first_tokens_are_distributed_as_the_model_says(temperature, top_k, top_p):
    model, context, draws = small_model(seed=2), [7, 8, 3, 9], 4000
    with torch.no_grad():
        model.token_embedding.weight.mul_(0.3)  # flatter, so that many tokens have a chance
    generator = SequenceGenerator(
        model,
        SPECIAL,
        max_len=1,
        sampling=True,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        batch_size=500,
    )
    answers = generator.fill_ids([context] * draws, seeds=range(draws))
    counts = Counter((answer.tokens or [SPECIAL.eop])[0] for (answer,) in answers)
    logits = slow.next_logprobs(model, context, [], 2, [])
    probabilities = slow_filter(logits, temperature, top_k, top_p)
    assert (probabilities > 0).sum() > 2
    assert_plausible(np.array([counts[token] for token in range(20)]), probabilities, draws)


def test_tokens_behind_the_first_are_distributed_as_the_model_says():
    model, context, draws = small_model(seed=4), [7, 3, 9], 6000
    with torch.no_grad():
        model.token_embedding.weight.mul_(0.3)
    generator = SequenceGenerator(model, SPECIAL, max_len=2, min_len=2, sampling=True, top_k=3, batch_size=500)
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


def test_sampling_is_not_greedy():
    model = small_model(seed=2)
    greedy = SequenceGenerator(model, SPECIAL, max_len=6).fill_ids([[7, 3]])
    generator = SequenceGenerator(model, SPECIAL, max_len=6, sampling=True, temperature=3.0)
    sampled = generator.fill_ids([[7, 3]] * 30, seeds=range(30))
    assert len({tuple(answer.tokens) for (answer,) in sampled}) > 10
    assert any(row != greedy[0] for row in sampled)


def test_samples_depend_on_prompt_and_seed_and_nothing_else():
    generator = SequenceGenerator(small_model(), SPECIAL, max_len=6, sampling=True, temperature=2.0, seed=3)
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


def test_log_probabilities_of_samples_are_the_models_own():
    model, context = small_model(seed=5), [7, 3, 8]
    generator = SequenceGenerator(model, SPECIAL, max_len=5, sampling=True, temperature=2.0, top_k=5)
    ((answer,),) = generator.fill_ids([context])
    whole = answer.tokens + ([SPECIAL.eop] if answer.ended else [])
    for index, token in enumerate(whole):
        expected = slow.next_logprobs(model, context, [], 1, whole[:index])[token]
        assert answer.token_logprobs[index] == pytest.approx(float(expected), abs=1e-4)
