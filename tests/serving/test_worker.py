"""What the engine's thread reports, and when."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from ftk.generation.engine.request import Event
from ftk.serving import worker as module
from ftk.serving.worker import Failed, Loaded, Stream, Worker


class Steps:
    """An engine that has written its events before."""

    is_busy, num_running, num_waiting, decoder = True, 2, 0, SimpleNamespace(models=[])

    def __init__(self, steps: Sequence[Sequence[Event]]) -> None:
        self.steps, self.cancelled, self.entered = list(steps), [], {}

    def cancel(self, number: int) -> int:
        self.cancelled.append(number)
        return 0

    def step(self) -> Sequence[Event]:
        return self.steps.pop(0)


def piece(event):
    assert [own[0][0] for own in event.alternatives] == [*event.tokens]
    return event.kind, event.tokens, event.logprobs


def reported(steps, share=None, commands=()):
    """What a worker reports of each step, as (ticket, piece or error): of prompts 1 and 2 with tickets 10 and 20."""
    found = []
    worker = Worker(None, None, found.append, None, None, share)
    streams = {number: Stream(10 * number, SimpleNamespace(add=piece)) for number in (1, 2)}
    own = Loaded(None, Steps(steps), 1, streams)
    worker._loaded, worker._numbers = [own], {10: (own, 1), 20: (own, 2)}
    for command in commands:
        worker._commands.put(command)
    by_step = []
    for _ in steps:
        worker._step()
        by_step.append([(report.ticket, report.piece or report.error) for one in found for report in one])
        found.clear()
    return by_step, own


def token(request, number, answer=0):
    return Event(request, "token", answer, [number], [-number / 8], alternatives=(((number, -number / 8),),))


STEPS = [
    [token(1, 1), token(2, 2)],
    [token(1, 3), token(2, 4)],
    [token(1, 5), token(2, 6)],
    [token(1, 7), Event(1, "answer"), Event(1, "done"), token(2, 8)],
    [token(2, 9), token(2, 10, answer=1), Event(2, "answer")],
]


def test_tokens_that_come_within_a_pause_are_one_report(monkeypatch):
    monkeypatch.setattr(module, "REPORT_SECONDS", 1e9)
    by_step, own = reported(STEPS)
    assert by_step == [
        [(10, ("token", [1], [-1 / 8])), (20, ("token", [2], [-2 / 8]))],  # the first ones at once
        [],
        [],
        [(10, ("token", [3, 5, 7], [-3 / 8, -5 / 8, -7 / 8])), (10, ("answer", (), ()))],
        [
            (20, ("token", [4, 6, 8, 9], [-4 / 8, -6 / 8, -1.0, -9 / 8])),
            (20, ("token", [10], [-10 / 8])),  # of another answer
            (20, ("answer", (), ())),
        ],
    ]
    assert list(own.streams) == [2]
    assert own.engine.cancelled == [1]


@pytest.mark.parametrize(("pause", "share"), [(0.0, None), (1e9, print)])
def test_behind_a_pause_and_where_ranks_share_the_model_each_step_is_reported(monkeypatch, pause, share):
    monkeypatch.setattr(module, "REPORT_SECONDS", pause)
    by_step, _ = reported(STEPS, share)
    assert [len(one) for one in by_step] == [2, 2, 2, 3, 3]


def test_what_may_take_long_does_not_hold_tokens_up(monkeypatch):
    monkeypatch.setattr(module, "REPORT_SECONDS", 1e9)
    by_step, _ = reported(STEPS, commands=[None])
    assert [len(one) for one in by_step] == [2, 2, 2, 3, 3]


@pytest.mark.parametrize("pause", [0.0, 1e9])
def test_an_error_comes_behind_what_was_kept_and_ends_the_prompt(monkeypatch, pause):
    monkeypatch.setattr(module, "REPORT_SECONDS", pause)
    cause = ValueError("not finite")
    by_step, own = reported([*STEPS[:2], [Event(1, "error", error=cause)], [token(1, 11)]])
    reports = [report for one in by_step for report in one if report[0] == 10]
    assert [report[1][1] for report in reports[:-1]] == [[1], [3]]
    assert isinstance(reports[-1][1], Failed)
    assert reports[-1][1].__cause__ is cause
    assert list(own.streams) == [2]
