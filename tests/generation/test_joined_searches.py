"""Requests that join a search that is under way: the same answers as alone, whatever their lengths."""

from __future__ import annotations

import pytest
import torch

from ftk.generation.processors import Processors
from ftk.generation.processors.forbidden import ForbiddenTokens, NoRepeatNgram
from ftk.generation.processors.length import MaxLength, MinLength
from ftk.generation.processors.penalties import RepetitionPenalty
from ftk.generation.search.greedy import GreedySearch as Greedy
from ftk.registry import SEARCHES
from tests.generation.test_engine import PROMPTS, alone, assert_alike, causal_model, drained, engine, request


@pytest.fixture(scope="module")
def model():
    return causal_model()


@pytest.mark.parametrize("options", [{}, {"sampling": True, "top_p": 0.9}, {"sampling": True, "nbest": 3}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_come_at_any_time_share_a_search_whatever_their_lengths(model, options, stream):
    of_all = Processors([RepetitionPenalty(1.5), NoRepeatNgram(2), ForbiddenTokens([7])])  # shared by some
    lengths = [(0, 9), (3, 3), (5, 30), (0, 6), (12, 12), (1, 4), (7, 20), (2, 2)]
    own = [(), of_all, [MinLength([4]), MaxLength([30])]]  # the search begins with a request that has none
    requests = [
        request(prompt, own[seed % 3], seed, stream, min_len=low, max_len=high, **options)
        for seed, (prompt, (low, high)) in enumerate(zip(PROMPTS, lengths, strict=True))
    ]
    together = engine(model)
    numbers, found, groups = [], {}, []
    for one in requests:  # two steps between any two
        numbers.append(together.submit(one))
        for event in [*together.step(), *together.step()]:
            found.setdefault(event.request, []).append(event)
        groups.append(len(together._groups))
    for number, events in drained(together).items():
        found.setdefault(number, []).extend(events)
    assert set(groups) == {1}
    for number, one in zip(numbers, requests, strict=True):
        *tokens, answered, done = found[number]
        assert (answered.kind, done.kind) == ("answer", "done")
        assert_alike(answered.answer, alone(model, one))
        if stream and "nbest" not in options:
            assert [token for event in tokens for token in event.tokens] == answered.answer.tokens


def one_after_the_other(model, requests):
    """The answers of one engine, of which each request begins two steps behind the one before."""
    together, numbers, found = engine(model), [], {}
    for one in requests:
        numbers.append(together.submit(one))
        for event in [*together.step(), *together.step()]:
            found[event.request, event.kind] = event
    found |= {(number, event.kind): event for number, events in drained(together).items() for event in events}
    assert sorted(together._free) == [0, 1, 2, 3]
    return [found.get((number, "answer")) or found[number, "error"] for number in numbers]


def test_a_processor_made_of_one_that_reads_no_answers_may_read_them(model):
    class NeverTwice(ForbiddenTokens):
        def __call__(self, state, scores):
            scores = super().__call__(state, scores)
            last = state.tokens[..., -1:].expand(*scores.shape[:2], min(state.step, 1))
            return scores.scatter(-1, last, float("-inf"))

    own = Processors([NeverTwice([7])])
    requests = [request(prompt, own, min_len=9, max_len=9) for prompt in PROMPTS[:4]]
    for event, one in zip(one_after_the_other(model, requests), requests, strict=True):
        assert_alike(event.answer, alone(model, one))


def test_searches_that_cannot_be_joined_end_their_requests_and_free_their_rows(model, monkeypatch):
    def raises(self, other):
        raise MemoryError("of a join")

    requests = [request(prompt, min_len=6) for prompt in PROMPTS[:2]]
    with monkeypatch.context() as patch:
        patch.setattr(Greedy, "join", raises)
        assert [str(event.error) for event in one_after_the_other(model, requests)] == ["of a join"] * 2
    for event, one in zip(one_after_the_other(model, requests), requests, strict=True):
        assert_alike(event.answer, alone(model, one))


def test_a_search_forgets_how_long_the_answers_were_that_have_left_it(model):
    together = engine(model)
    together.submit(request(PROMPTS[0], min_len=30, max_len=30))
    together.step()
    last = together.submit(request(PROMPTS[1], min_len=2, max_len=40, sampling=False))
    together.cancel(last)
    short = together.submit(request(PROMPTS[2], min_len=4, max_len=4))
    for _ in range(3):
        together.step()
    (group,) = together._groups
    assert group.search.lines.tokens.size(-1) == 30
    together.cancel(0)
    assert [job.number for job in group.jobs] == [short]
    assert group.search.lines.tokens.size(-1) == 4


def test_a_search_of_a_plugin_is_joined_by_none(model):
    class Late(Greedy):
        def choose(self, scores):
            chosen = super().choose(scores)
            return chosen if self.step < 3 else torch.full_like(chosen, 5)

    SEARCHES.register("test_late")(Late)
    try:
        together, numbers = engine(model), []
        for prompt in PROMPTS[:3]:
            numbers.append(together.submit(request(prompt, search="test_late", min_len=6)))
            together.step()
        assert len(together._groups) == 3
        found = drained(together)
        assert [found[number][0].answer.tokens[3:] for number in numbers] == [[5] * 3] * 3
    finally:
        del SEARCHES._entries["test_late"]
