"""Beam sampling: against plain lists with the same random numbers, and against its distribution."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftk.generation.search.random import draw_without_replacement, prompt_key, step_numbers
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation import slow
from tests.generation.slow import SPECIAL, small_model
from tests.generation.tables import TABLE_SPECIAL, SlowBeam, TableModel, assert_same, fill, random_table, whole
from tests.generation.test_sampling import assert_plausible, slow_filter


def slow_beam_sampling(next_scores, uniforms, width, max_len, penalty, filters):
    """[(tokens with their end, score)], best first: uniforms [max_len, 2 W]."""
    beam = SlowBeam(width, max_len, penalty, "true")
    for numbers in uniforms:
        if beam.closed:
            break
        candidates = []
        for tokens, total in beam.live:
            for token, share in enumerate(slow_filter(next_scores(tokens), **filters)):
                candidates.append((total + (math.log(share) if share > 0 else -math.inf), tokens, token))
        weights = np.exp([total for total, _, _ in candidates])
        drawn = []
        for number in numbers:
            if weights.sum() == 0:
                break
            index = int(np.searchsorted(weights.cumsum(), number * weights.sum(), side="right"))
            drawn.append(index)
            weights[index] = 0
        beam.take(sorted((candidates[index] for index in drawn), key=lambda one: -one[0]))
    return beam.done


@pytest.mark.parametrize("filters", [{}, {"temperature": 1.7}, {"top_k": 4}, {"top_p": 0.7, "min_p": 0.1}])
@pytest.mark.parametrize("width", [2, 3])
def test_answers_equal_the_slow_lists_with_the_same_numbers(width, filters):
    model = small_model(seed=4)
    contexts = [[7, 8, 3, 9], [3], [10, 11, 12, 13, 14, 3, 6], [7, 3, 7, 7, 8]]
    generator = BlankGenerator(
        model, SPECIAL, search="beam_sampling", beam=width, nbest=width, max_len=4, seed=5, **filters
    )
    for context, (answer,) in zip(contexts, generator.fill_ids(contexts), strict=True):
        (uniforms,) = step_numbers([prompt_key(5, context)], 0, 4, 2 * width)
        blank = context.index(3)

        def next_scores(tokens, context=context, blank=blank):
            return slow.next_logprobs(model, context, [], blank, tokens)

        expected = slow_beam_sampling(next_scores, uniforms, width, 4, 1.0, filters)
        assert_same([answer, *answer.others], expected, atol=1e-4)


def test_what_is_drawn_is_distributed_as_draws_without_replacement():
    """One step: four of seven tokens are drawn, and the best two of them are the answers."""
    table, draws = random_table(9, 3), 6000
    shares = [one for one in table[TABLE_SPECIAL.sop] if one > 0]
    words = [token for token, one in enumerate(table[TABLE_SPECIAL.sop]) if one > 0]
    expected: Counter[tuple[int, int]] = Counter()
    for drawn in itertools.permutations(range(len(words)), 4):
        chance, rest = 1.0, 1.0
        for index in drawn:
            chance, rest = chance * shares[index] / rest, rest - shares[index]
        best = sorted(drawn, key=lambda index: -shares[index])[:2]
        expected[words[best[0]], words[best[1]]] += chance
    assert sum(expected.values()) == pytest.approx(1.0)
    generator = BlankGenerator(
        TableModel(table), TABLE_SPECIAL, search="beam_sampling", beam=2, nbest=2, max_len=1, batch_size=1000
    )
    found = Counter(
        (whole(answer)[0], whole(answer.others[0])[0])
        for (answer,) in generator.fill_ids([[4]] * draws, seeds=range(draws))
    )
    keys = list(expected)
    assert_plausible(np.array([found[key] for key in keys]), np.array([expected[key] for key in keys]), draws)
    assert set(found) <= set(keys)


def test_one_choice_for_each_hypothesis_is_greedy():
    for seed in range(6):
        table = random_table(8, seed)
        cold = fill(table, search="beam_sampling", beam=3, max_len=4, top_k=1)
        assert whole(cold[0]) == whole(fill(table, max_len=4)[0])


def test_seeds_matter_and_one_choice_left_is_enough():
    table = random_table(12, 1)
    answers = {tuple(whole(fill(table, search="beam_sampling", beam=3, max_len=4, seed=s)[0])) for s in range(30)}
    assert len(answers) > 3
    only = [[0.0, 0.0, 1.0, 0.0, 0.0]] * 3 + [[1.0, 0.0, 0.0, 0.0, 0.0]] * 2
    assert [whole(one) for one in fill(only, search="beam_sampling", beam=3, nbest=3, max_len=4)] == [[0, 2]]


def test_draws_without_replacement_are_those_of_one_long_row():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(3, 4, 6, generator=generator, dtype=torch.float64)
    weights[weights < 0.5] = 0.0
    weights[1, 2:] = 0.0
    weights[2] = 0.0
    weights[2, 3, 5] = 0.1  # one thing only can be drawn
    uniforms = torch.rand(3, 8, generator=generator, dtype=torch.float64)
    indices, real = draw_without_replacement(weights.clone(), uniforms)
    for own, numbers, found, is_real in zip(weights.flatten(1).numpy().copy(), uniforms, indices, real, strict=True):
        for number, index, there in zip(numbers.tolist(), found.tolist(), is_real.tolist(), strict=True):
            assert there == (own.sum() > 0)
            if there:
                assert index == int(np.searchsorted(own.cumsum(), number * own.sum(), side="right"))
                own[index] = 0.0
    assert real.sum(1).tolist() == [8, min(8, int((weights[1] > 0).sum())), 1]


class CountsMade(TorchDispatchMode):
    """Counts the elements of all tensors that are made."""

    def __init__(self):
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in given:
                self.made += one.numel()
        return result


def test_a_draw_makes_nothing_as_large_as_what_it_draws_from():
    """A beam of 400 took 6 GB when every draw made a copy of all its continuations."""
    width, size, count = 200, 500, 40
    uniforms = torch.rand(1, count, dtype=torch.float64)
    with CountsMade() as counter:
        draw_without_replacement(torch.rand(1, width, size, dtype=torch.float64), uniforms)
    assert counter.made < 2 * width * size + count * 4 * (width + size)
