"""Beam search against every answer there is, against slow lists, and on tables worked out by hand."""

from __future__ import annotations

import math

import pytest

from ftk.tasks.glm_blank import BlankGenerator
from tests.generation import slow
from tests.generation.slow import SPECIAL, small_model
from tests.generation.tables import assert_same, every_answer, fill, log_row, random_table, slow_beam, whole

#                          0     1     2     3  4
TABLE = [
    [0.10, 0.20, 0.70, 0.0, 0.0],  # after 0
    [0.00, 0.10, 0.90, 0.0, 0.0],  # after 1
    [1.00, 0.00, 0.00, 0.0, 0.0],
    [0.60, 0.35, 0.05, 0.0, 0.0],  # after the start
    [1.00, 0.00, 0.00, 0.0, 0.0],
]


def fill_table(table, **options):
    return fill(table, **options)[0]


def test_a_table_worked_out_by_hand():
    greedy = fill_table(TABLE, max_len=4, length_penalty=0.0)
    assert greedy.tokens == [0]
    assert math.exp(greedy.score) == pytest.approx(0.6 * 0.7)
    beam = fill_table(TABLE, beam=2, max_len=4, length_penalty=0.0)
    assert (beam.tokens, math.exp(beam.score)) == ([0], pytest.approx(0.42))


def test_beam_finds_what_greedy_misses():
    table = [row[:] for row in TABLE]
    table[0] = [0.3, 0.4, 0.3, 0.0, 0.0]  # the likeliest first token leads nowhere
    assert fill_table(table, max_len=3, length_penalty=0.0).tokens[0] == 0
    beam = fill_table(table, beam=2, max_len=3, length_penalty=0.0)
    assert (beam.tokens, math.exp(beam.score)) == ([1], pytest.approx(0.35 * 0.9))


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_narrow_beams_equal_the_slow_lists(seed, width):
    model = small_model(seed=seed)
    contexts = [[7, 8, 3, 9], [3], [10, 11, 12, 13, 14, 3, 6], [7, 3, 7, 7, 8]]
    generator = BlankGenerator(model, SPECIAL, beam=width, max_len=6, length_penalty=0.8)
    for context, (answer,) in zip(contexts, generator.fill_ids(contexts), strict=True):

        def next_scores(tokens, context=context):
            return slow.next_logprobs(model, context, [], context.index(3), tokens).tolist()

        tokens, score = slow_beam(next_scores, width, 6, 0.8)[0]
        assert whole(answer) == tokens
        assert answer.score == pytest.approx(score, abs=1e-5)


def test_a_beam_of_one_is_greedy():
    model = small_model(seed=1)
    contexts = [[7, 8, 3, 9], [11, 3, 12, 4, 13], [3]]
    generator = BlankGenerator(model, SPECIAL, max_len=6)
    greedy = generator.fill_ids(contexts)
    generator.config.search = "beam"
    for row, expected in zip(generator.fill_ids(contexts), greedy, strict=True):
        assert [answer.tokens for answer in row] == [answer.tokens for answer in expected]


def test_equal_scores_are_settled_by_the_order_of_the_vocabulary():
    table = [[0.25, 0.25, 0.5, 0.0, 0.0]] * 2 + [
        [1.0, 0.0, 0.0, 0.0, 0.0],
        [0.5, 0.5, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0, 0.0],
    ]
    assert [fill_table(table, beam=2, max_len=2).tokens for _ in range(3)] == [[0]] * 3


@pytest.mark.parametrize("early_stopping", ["true", "false", "never"])
@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0, 2.0, -0.5])
def test_n_best_and_early_stopping_equal_the_slow_lists(early_stopping, penalty):
    met = set()
    for seed in range(12):
        table = random_table(9, seed)
        for width in (2, 4):
            found = fill(
                table, beam=width, nbest=width, max_len=6, length_penalty=penalty, early_stopping=early_stopping
            )
            expected = slow_beam(lambda tokens, t=table: log_row(t, tokens), width, 6, penalty, early_stopping)
            assert_same(found, expected)
            met |= {answer.ended for answer in found}
    assert True in met


def test_the_rules_of_early_stopping_differ():
    """Or the comparison above would say nothing of them."""
    answers = {
        rule: [
            [whole(answer) for answer in fill(random_table(9, seed), beam=3, nbest=3, max_len=8, early_stopping=rule)]
            for seed in range(40)
        ]
        for rule in ("true", "false", "never")
    }
    assert answers["true"] != answers["false"] != answers["never"] != answers["true"]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.8])
@pytest.mark.parametrize("seed", range(3))
def test_the_n_best_of_a_wide_beam_are_the_n_best_of_all(seed, penalty):
    table = random_table(6, seed)
    found = fill(table, beam=60, nbest=20, max_len=3, length_penalty=penalty, early_stopping="never")
    assert_same(found, every_answer(table, 3, penalty)[:20])


def test_fewer_answers_than_asked_for_are_given_where_there_are_no_more():
    table = [[0.0, 0.0, 1.0, 0.0, 0.0]] * 3 + [[0.5, 0.5, 0.0, 0.0, 0.0]] * 2
    assert [whole(answer) for answer in fill(table, beam=4, nbest=4, max_len=3)] == [[0, 2], [1, 2]]


def test_n_best_of_later_blanks_follow_the_best_of_the_earlier():
    model, context = small_model(seed=3), [7, 3, 8, 4, 9]
    plain = BlankGenerator(model, SPECIAL, beam=4, max_len=5).fill_ids([context])
    (answers,) = BlankGenerator(model, SPECIAL, beam=4, nbest=3, max_len=5).fill_ids([context])
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain[0]]
    for answer in answers:
        assert len(answer.others) == 2
        scores = [answer.score, *(other.score for other in answer.others)]
        assert scores == sorted(scores, reverse=True)
        assert all(other.others == () for other in answer.others)
