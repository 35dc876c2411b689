"""Scores of candidates, without HTTP: those of the generator, in parts, within limits."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from ftk.serving import fill
from ftk.serving.refusal import Refusal
from tests.serving.services import PROMPTS, held, serving, until


def test_a_score_needs_room_for_its_candidate_alone(continuer, monkeypatch):
    """Not for the longest answer, which may have all positions."""
    monkeypatch.setattr(continuer, "config", replace(continuer.config, max_len=128))
    body = {"prompt": "the quick", "candidates": [" fox"], "end": False}
    ((answer,),) = serving(continuer, lambda service: anext(fill.scores(body, service)))["candidates"]
    assert answer["logprob"] == pytest.approx(sum(continuer.score("the quick", [" fox"])[0].logprobs), abs=1e-5)


def test_scores_are_the_generators(generator):
    async def use(service):
        bodies = [{"prompt": PROMPTS[0], "candidates": given} for given in ([["brown"], ["lazy"]], ["brown", "lazy"])]
        return [event for body in bodies async for event in fill.scores(body, service)]

    nested, flat = serving(generator, use)
    expected = [own[0].logprob for own in generator.score_candidates(PROMPTS[0], [["brown"], ["lazy"]])]
    assert [own[0]["logprob"] for own in nested["candidates"]] == pytest.approx(expected, abs=1e-5)
    assert flat == nested


def test_many_candidates_of_several_requests_are_scored_in_parts_with_a_step_between_any_two(generator, monkeypatch):
    monkeypatch.setattr(fill, "_TOKENS_AT_ONCE", 16)
    candidates = [[text] for text in ("brown", "lazy dog", "the old friends", "fox") * 4]
    body = {"prompt": PROMPTS[0], "candidates": candidates}

    async def use(service, log):
        worker, step, score = service.worker, service.worker._step, generator.score_encoded
        monkeypatch.setattr(worker, "_step", lambda: (log.append(0), step()))
        monkeypatch.setattr(generator, "score_encoded", lambda own: (log.append(len(own[0].candidates)), score(own))[1])
        with held(service):
            scored = [asyncio.ensure_future(anext(fill.scores(body, service))) for _ in range(4)]
            await until(lambda: len(service._called) == len(scored))  # each has a part that waits
        return await asyncio.gather(*scored)

    expected = [own[0].logprob for own in generator.score_candidates(PROMPTS[0], candidates)]
    log: list[int] = []
    for found in serving(generator, lambda service: use(service, log)):
        assert [own[0]["logprob"] for own in found["candidates"]] == pytest.approx(expected, abs=1e-5)
    assert sum(log) == 4 * len(candidates)
    assert sum(map(bool, log)) > 12
    assert not any(one and other for one, other in itertools.pairwise(log))


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ({"max_waiting": 1}, "lazy dog " * 3, "ask for at most 3"),  # a place in the queue for each part
        ({"max_context": 24}, "the old friends " * 4, "candidate 1 has"),
    ],
)
def test_candidates_have_limits(generator, monkeypatch, options, text, message):
    monkeypatch.setattr(fill, "_TOKENS_AT_ONCE", 8)

    async def use(service):
        with pytest.raises(Refusal, match=message) as refused:
            await anext(fill.scores({"prompt": PROMPTS[0], "candidates": [[text]] * 8}, service))
        return refused.value.status, service.num_asked

    assert serving(generator, use, **options) == (400, 0)
