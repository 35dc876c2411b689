"""Diverse beam search against its paper's algorithm in plain lists, and where it must be plain beam search."""

from __future__ import annotations

import pytest

from ftk.tasks.glm_blank import BlankGenerator
from tests.generation import slow
from tests.generation.slow import SPECIAL, small_model
from tests.generation.tables import assert_same, fill, log_row, random_table, slow_beam, slow_diverse_beam, whole


@pytest.mark.parametrize("early_stopping", ["true", "false", "never"])
@pytest.mark.parametrize(("width", "groups"), [(4, 2), (4, 4), (6, 3), (6, 2)])
@pytest.mark.parametrize("strength", [0.3, 2.0])
def test_groups_equal_the_slow_lists(width, groups, strength, early_stopping):
    for seed in range(8):
        table = random_table(12, seed)
        found = fill(
            table,
            search="diverse_beam",
            beam=width,
            nbest=width,
            diverse_groups=groups,
            diversity_strength=strength,
            max_len=5,
            length_penalty=0.8,
            early_stopping=early_stopping,
        )
        expected = slow_diverse_beam(
            lambda tokens, t=table: log_row(t, tokens), width, groups, strength, 5, 0.8, early_stopping
        )
        assert_same(found, expected)


@pytest.mark.parametrize("seed", range(3))
def test_a_real_model_gives_what_the_slow_lists_give(seed):
    model, context = small_model(seed=seed), [7, 8, 3, 9]
    generator = BlankGenerator(
        model, SPECIAL, search="diverse_beam", beam=4, nbest=4, diversity_strength=1.5, max_len=5
    )
    ((answer,),) = generator.fill_ids([context])
    expected = slow_diverse_beam(
        lambda tokens: slow.next_logprobs(model, context, [], 2, tokens).tolist(), 4, 2, 1.5, 5, 1.0
    )
    assert_same([answer, *answer.others], expected)
    for one in (answer, *answer.others):  # the model's own, not lessened
        tokens = whole(one)
        own = [float(slow.next_logprobs(model, context, [], 2, tokens[:i])[token]) for i, token in enumerate(tokens)]
        assert one.token_logprobs == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_one_group_is_beam_search_and_without_strength_all_groups_are_alike(seed):
    table = random_table(10, seed)
    options = {"search": "diverse_beam", "beam": 4, "nbest": 4, "max_len": 5}
    plain = slow_beam(lambda tokens: log_row(table, tokens), 4, 5, 1.0)
    assert_same(fill(table, **options, diverse_groups=1), plain)
    answers = fill(table, **options, diverse_groups=2, diversity_strength=0.0)
    half = slow_beam(lambda tokens: log_row(table, tokens), 2, 5, 1.0)
    assert sorted(map(whole, answers)) == sorted([tokens for tokens, _ in half] * 2)


def test_a_great_strength_lets_no_two_groups_begin_alike():
    for seed in range(10):
        options = {"beam": 4, "nbest": 4, "max_len": 4, "search": "diverse_beam", "diverse_groups": 4}
        answers = fill(random_table(12, seed), **options, diversity_strength=50.0)
        words = [answer.tokens[0] for answer in answers if answer.tokens]  # an end keeps nobody away
        assert len(set(words)) == len(words)
