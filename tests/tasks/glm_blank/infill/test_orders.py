"""Orders of blanks and answers written back equal slow ways that read everything anew for every token."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.generation.processors.length import MaxLength, MinLength
from ftk.tasks.glm_blank import BlankGenerator
from ftk.tasks.glm_blank.infill.blanks import blank_numbers
from ftk.tasks.glm_blank.infill.config import FillConfig
from tests.generation.slow import BLANKS, SPECIAL, assert_answers, greedy_answer, next_logprobs, small_model

CONTEXTS = [
    [6, 7, 3, 8, 4, 9, 10, 5],
    [3],
    [3, 3, 4, 12, 13, 3, 6],
    [6, 7],
    [9, 9, 8, 7, 4, 6, 12, 13, 14, 15, 16, 17, 3, 18],
]


def slow_fill(model, context, order, max_len, reencode):
    """Every choice made by reading the whole sequence; order is "confident" or a list of numbers."""
    places = dict(enumerate(index for index, token in enumerate(context) if token in BLANKS))
    order = list(order) if order != "confident" else order
    filled, found = [], {}
    while places:
        if order == "confident":
            sure = {n: float(next_logprobs(model, context, filled, at, []).max()) for n, at in places.items()}
            number = max(sorted(sure), key=sure.__getitem__)
        else:
            number = next(one for one in order if one in places)
        place = places.pop(number)
        found[number] = greedy_answer(partial(next_logprobs, model, context, filled, place), max_len)
        answer = found[number][0]
        if reencode:
            context = context[:place] + answer + context[place + 1 :]
            places = {n: at + (len(answer) - 1) * (at > place) for n, at in places.items()}
        else:
            filled.append((place, answer))
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("reencode", [False, True])
@pytest.mark.parametrize("order", ["left", "3,1", "2,4,1", "confident"])
@pytest.mark.parametrize("block_positions", [True, False])
def test_every_order_equals_the_slow_way(order, reencode, block_positions):
    model = small_model(seed=1, block_positions=block_positions)
    generator = BlankGenerator(model, SPECIAL, max_len=4, blank_order=order, reencode=reencode, batch_size=3)
    for context, answers in zip(CONTEXTS, generator.fill_ids(CONTEXTS), strict=True):
        numbers = order if order == "confident" else blank_numbers(order, sum(token in BLANKS for token in context))
        assert_answers(answers, slow_fill(model, context, numbers, 4, reencode), 2e-5)


@pytest.mark.parametrize("options", [{}, {"beam": 3, "nbest": 2}, {"sampling": True, "top_k": 6, "nbest": 2}])
@pytest.mark.parametrize("reencode", [False, True])
@pytest.mark.parametrize("order", ["confident", "3,1"])
def test_alternatives_are_those_at_the_time_when_a_blank_was_filled(order, reencode, options):
    """Each blank's, given the text as it was read then, and the answers that stood behind it then."""
    model = small_model(seed=1)
    how = {"max_len": 3, "blank_order": order, "reencode": reencode, "batch_size": 3, **options}
    rows = BlankGenerator(model, SPECIAL, alternatives=4, **how).fill_ids(CONTEXTS)
    plain = BlankGenerator(model, SPECIAL, **how).fill_ids(CONTEXTS)
    for context, answers, without in zip(CONTEXTS, rows, plain, strict=True):
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in without]
        places = dict(enumerate(index for index, token in enumerate(context) if token in BLANKS))
        fixed = iter(blank_numbers("left" if order == "confident" else order, len(places)))
        filled = []
        while places:
            sure = {n: float(next_logprobs(model, context, filled, at, []).max()) for n, at in places.items()}
            number = max(sorted(sure), key=sure.__getitem__) if order == "confident" else next(fixed)
            place, answer = places.pop(number), answers[number]
            for one in (answer, *answer.others):
                assert len(one.alternatives) == len(one.token_logprobs) > 0
                for step, there in enumerate(one.alternatives):
                    expected = next_logprobs(model, context, filled, place, one.tokens[:step]).topk(4)
                    assert [token for token, _ in there] == expected.indices.tolist()
                    np.testing.assert_allclose([value for _, value in there], expected.values, rtol=0, atol=1e-4)
            if reencode:
                context = [*context[:place], *answer.tokens, *context[place + 1 :]]
                shift = len(answer.tokens) - 1
                places = {n: at + shift * (at > place) for n, at in places.items()}
            else:
                filled.append((place, answer.tokens))


def test_the_orders_differ():
    model = small_model(seed=1)
    found = {
        (order, reencode): [
            [answer.tokens for answer in answers]
            for answers in BlankGenerator(model, SPECIAL, max_len=4, blank_order=order, reencode=reencode).fill_ids(
                CONTEXTS
            )
        ]
        for order in ("left", "3,1", "confident")
        for reencode in (False, True)
    }
    assert len({str(one) for one in found.values()}) == len(found)


def test_named_blanks_come_first_and_the_others_from_left_to_right():
    assert blank_numbers("left", 3) == [0, 1, 2]
    assert blank_numbers("3, 1", 4) == [2, 0, 1, 3]
    assert blank_numbers("5,2", 3) == [1, 0, 2]
    assert blank_numbers("2", 0) == []


@pytest.mark.parametrize("options", [{"blank_order": "2,1"}, {"blank_order": "confident"}, {"reencode": True}])
def test_processors_know_a_blank_by_its_number_in_the_text(options):
    generator = BlankGenerator(
        small_model(), SPECIAL, max_len=5, processors=[MinLength([1, 2, 3]), MaxLength([1, 2, 3])], **options
    )
    (answers,) = generator.fill_ids([CONTEXTS[0]])
    assert [len(answer.tokens) for answer in answers] == [1, 2, 3]


@pytest.mark.parametrize("options", [{"beam": 3}, {"sampling": True, "top_k": 5}])
@pytest.mark.parametrize("how", [{"blank_order": "2,1"}, {"blank_order": "confident", "reencode": True}])
def test_the_batch_does_not_matter_in_any_order(options, how):
    generator = BlankGenerator(small_model(), SPECIAL, max_len=4, **options, **how)
    together = generator.fill_ids(CONTEXTS, seeds=range(5))
    for index, context in enumerate(CONTEXTS):
        (alone,) = generator.fill_ids([context], seeds=[index])
        assert [answer.tokens for answer in alone] == [answer.tokens for answer in together[index]]


@pytest.mark.parametrize("options", [{}, {"blank_order": "confident"}, {"reencode": True}])
def test_a_hundred_blanks_of_all_kinds(options):
    context = [6, *([3, 7, 4, 8, 5] * 34)[:-3]]
    assert sum(token in BLANKS for token in context) == 100
    counts = []
    generator = BlankGenerator(small_model(max_positions=600), SPECIAL, max_len=2, **options)
    (answers,) = generator.fill_ids([context], progress=counts.append)
    assert len(answers) == 100
    assert all(0 < len(answer.token_logprobs) <= 2 for answer in answers)
    assert sum(counts) == 1


@pytest.mark.parametrize(
    ("order", "message"),
    [("right", "it is left, confident, or numbers"), ("1,0", "numbers from 1 on"), ("2,2", "names a blank twice")],
)
def test_orders_that_are_none_are_refused(order, message):
    assert any(message in error for error in mistakes(FillConfig(blank_order=order)))


def test_answers_written_back_must_fit():
    generator = BlankGenerator(small_model(), SPECIAL, max_len=20, reencode=True)
    generator.fill_ids([[6] * 24 + [3, 3, 3]])  # 65 positions: 24, two answers of 20, and a blank
    with pytest.raises(UserError, match="28 tokens long; with 3 answers of up to 20 tokens .* positions for 27"):
        generator.fill_ids([[6] * 25 + [3, 3, 3]])


def test_answers_that_take_all_positions_by_themselves_are_refused_with_what_would_fit():
    context = [6] + [3] * 10
    with pytest.raises(UserError, match="10 answers of up to 20 tokens, .* 65 positions; .* can be at most 7, or ask"):
        BlankGenerator(small_model(), SPECIAL, max_len=20, reencode=True).fill_ids([context])
    with pytest.raises(UserError, match="at most 7"):
        BlankGenerator(small_model(), SPECIAL, max_len=8, reencode=True).fill_ids([context])
    BlankGenerator(small_model(), SPECIAL, max_len=7, reencode=True).fill_ids([context])
