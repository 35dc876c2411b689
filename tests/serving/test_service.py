"""The service without HTTP: prompts share an engine, leave it, wait, and the model is loaded again."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from typing import Any

import pytest

import ftk
from ftk.errors import UserError
from ftk.generation.engine.engine import Engine
from ftk.serving import app, fill
from ftk.serving.prompts import encode
from ftk.serving.refusal import Refusal, request_id
from ftk.serving.worker import Command, Worker
from ftk.version import __version__
from tests.generation.test_adapted import save_adapter
from tests.serving.services import PROMPTS, filled, held, posted, sent_back, serving, until, whole


def test_another_rank_takes_the_same_steps(run, tmp_path, monkeypatch):
    adapter = save_adapter(tmp_path / "one", ftk.load_model(run, "cpu"), ("output",), 0)
    generator, other = (
        ftk.load_generator(run, "cpu", max_len=8, batch_size=2, adapters={"one": adapter}) for _ in range(2)
    )
    score, scored_by_other = other.score_encoded, []
    monkeypatch.setattr(other, "score_encoded", lambda prompts: scored_by_other.append(score(prompts)))
    sent: queue.SimpleQueue[str] = queue.SimpleQueue()  # as it goes over the network
    own, theirs = [], []
    follower = Worker(lambda: other, None, theirs.append, lambda generator: None, lambda error: None)
    thread = threading.Thread(target=follower.follow, args=[lambda: json.loads(sent.get())])
    thread.start()

    async def use(service):
        report = service.worker.report
        service.worker.report = lambda reports: (own.append(reports), report(reports))
        leaves = service.answer([encode(service, PROMPTS[1], {"min_len": 8}, {}, 1, stream=True)])
        await anext(leaves)
        await asyncio.gather(
            filled(
                service, {"prompt": PROMPTS, "sampling": True, "top_k": 5, "stop": ["fox"], "forbid_words": ["the"]}
            ),
            whole(service, {"prompt": "the quick", "suffix": " dog", "n": 2, "max_tokens": 3, "logprobs": 2}),
            filled(service, {"prompt": PROMPTS, "model": "one"}),
            leaves.aclose(),
        )
        body = {"prompt": PROMPTS[0], "candidates": [["brown"], ["lazy"]], "model": "one"}
        return [event async for event in fill.scores(body, service)]

    (scored,) = serving(generator, use, share=lambda orders: sent.put(json.dumps(orders)), adapters=[f"one={adapter}"])
    thread.join(60)
    assert not thread.is_alive()  # it has stopped when the first rank did
    assert [len(reports) for reports in theirs] == [len(reports) for reports in own]
    assert theirs == own
    (((first, second),),) = scored_by_other
    own_scores = [[answer["logprob"] for answer in one] for one in scored["candidates"]]
    assert own_scores == [[answer.logprob for answer in one] for one in (first, second)]


def test_a_client_that_leaves_frees_its_row(generator):
    async def use(service):
        prompts = [encode(service, PROMPTS[0], {"min_len": 8}, {}, 1, stream=True) for _ in range(60)]
        pieces = service.answer(prompts)
        await anext(pieces)
        busy = service.num_asked
        await pieces.aclose()
        # Called behind the cancellations, between two steps.
        return busy, service.num_asked, *await service.call((lambda: dict(service.worker._loaded[-1].streams), {}))

    busy, *left = serving(generator, use)
    assert busy > 0
    assert left == [0, {}]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_stream_that_waits_is_pinged_and_can_be_cancelled_by_its_id(generator, monkeypatch, is_cancelled):
    monkeypatch.setattr(app, "_PING", 0.01)
    request_id.set("own")

    async def use(service):
        sent: list[Any] = []
        with held(service):
            body = {"prompt": "the", "stream": True, "temperature": 0}
            answered = asyncio.ensure_future(sent_back(service, "/v1/completions", body, sent))
            await until(lambda: len(sent) > 3)
            if is_cancelled:
                with pytest.raises(Refusal, match="no request 'other' is being answered"):
                    service.cancel("other")
                service.cancel("own")
                await answered
        return await answered

    status, content = serving(generator, use)
    pings, events = content.split(b"data: ", 1)
    assert (status, {*pings.split(b"\n\n")}) == (200, {b": ping", b""})
    last = events.replace(b": ping\n\n", b"").split(b"\n\ndata: ")[-1]
    assert (json.loads(last)["error"]["code"] if is_cancelled else last) == (
        "cancelled" if is_cancelled else b"[DONE]\n\n"
    )


def test_a_request_whose_task_is_cancelled_before_its_answer_leaves_nothing(generator):
    async def use(service):
        with held(service):
            answered = asyncio.ensure_future(posted(service, "/v1/fill", {"prompt": PROMPTS[0]}))
            await until(lambda: service.num_asked == 1)
            answered.cancel()
            await asyncio.wait([answered])
            await asyncio.sleep(0)
            return answered.cancelled(), service.num_asked, service.inboxes

    assert serving(generator, use) == (True, 0, {})


@pytest.mark.parametrize("stream", [True, False])
def test_waits_and_steps_are_counted(generator, stream):
    async def use(service):
        await filled(service, {"prompt": PROMPTS, "stream": stream, "min_len": 8})
        return service.metrics.registry.get_sample_value

    value = serving(generator, use)
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency"):
        assert value(f"ftk_{name}_seconds_count") == len(PROMPTS)
        assert value(f"ftk_{name}_seconds_sum") <= value("ftk_e2e_request_latency_seconds_sum")
    names = "time_to_first_token", "request_decode_time", "e2e_request_latency"
    first, decode, both = (value(f"ftk_{name}_seconds_sum") for name in names)
    assert (first + decode, decode > first / 100) == (pytest.approx(both), True)
    assert value("ftk_inter_token_latency_seconds_count") >= len(PROMPTS)
    steps = value("ftk_step_seconds_count")
    assert steps == value("ftk_step_rows_count") == value("ftk_step_rows_bucket", {"le": "2.0"})
    assert steps < value("ftk_step_rows_sum") <= 2 * steps
    found = {"version": __version__, "model": "run", "fingerprint": generator.digest}
    assert value("ftk_info", found) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_of_a_prompt_that_is_cancelled_are_counted(generator, monkeypatch, stream):
    step, identity = Engine.step, request_id.get()

    async def use(service):
        def cancelled(engine):  # with its fourth token
            events = step(engine)
            if engine.num_steps == 3:
                service.loop.call_soon_threadsafe(service.cancel, identity)
                while service.worker._commands.empty():
                    time.sleep(0.001)
            return events

        monkeypatch.setattr(Engine, "step", cancelled)
        with pytest.raises(Refusal, match="was cancelled"):
            await filled(service, {"prompt": PROMPTS[2], "stream": stream, "min_len": 8})
        await service.call((lambda: None, {}))  # behind the cancellation
        return service.metrics.registry.get_sample_value("ftk_generation_tokens_total")

    assert serving(generator, use) == 4


def test_each_prompt_is_counted_once_by_what_ended_it(generator, monkeypatch):
    step, steps, is_counted = Engine.step, threading.Semaphore(0), threading.Event()

    def counted(engine):  # so that no answer ends before its client leaves
        if is_counted.is_set():
            steps.acquire()
        return step(engine)

    async def begun(service, count):
        is_counted.set()
        prompts = [encode(service, PROMPTS[0], {"min_len": 8}, {}, 1, stream=True) for _ in range(count)]
        pieces = service.answer(prompts)
        first = asyncio.ensure_future(anext(pieces))
        while not first.done():
            steps.acquire(blocking=False)  # at most one is ahead
            steps.release()
            await asyncio.sleep(0.01)
        return pieces

    def go_on():
        is_counted.clear()
        steps.release()

    def broken(number, prompt):
        raise UserError("no such text")

    async def use(service):
        monkeypatch.setattr(Engine, "step", counted)
        body = {"prompt": "the quick", "max_tokens": 3, "temperature": 0}
        await whole(service, {**body, "n": 2, "min_tokens": 3})
        await whole(service, {**body, "logit_bias": {str(generator.framing.ends[0]): 100}})
        await (await begun(service, 3)).aclose()
        go_on()
        pieces = await begun(service, 4)
        service.cancel(request_id.get())
        with pytest.raises(Refusal, match="was cancelled"):
            [piece async for piece in pieces]
        go_on()
        with monkeypatch.context() as patch:
            patch.setattr(generator, "text_stream", broken)
            with pytest.raises(Refusal, match="no such text"):
                await whole(service, body)
        with held(service):
            service.config.request_timeout = 0.01
            with pytest.raises(Refusal, match="no whole answer"):
                await whole(service, body)
        return service.metrics.registry.get_sample_value

    value = serving(generator, use)
    reasons = {"stop": 1, "length": 2, "client_left": 3, "cancelled": 4, "error": 1, "timeout": 1}
    assert {one: value("ftk_requests_finished_total", {"finish_reason": one}) for one in reasons} == reasons


def test_a_stream_that_waits_says_how_many_are_ahead(generator):
    async def use(service):
        body = {"prompt": PROMPTS[0], "stream": True, "min_len": 8}
        found = await asyncio.gather(*(filled(service, body) for _ in range(5)))
        return [events[0] for events in found]

    events = serving(generator, use)
    assert [event["type"] for event in events] == ["piece"] * 2 + ["waiting"] * 3
    assert [event["ahead"] for event in events[2:]] == [0, 1, 2]


def test_a_full_queue_refuses_and_recovers(generator):
    async def use(service):
        goes_on = threading.Event()
        service.worker.call(goes_on.wait, {}, lambda: True)
        pieces = service.answer([encode(service, PROMPTS[0], {}, {}, 1, stream=True) for _ in range(3)])
        first = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)  # until it waits for the engine, which waits as well
        refused = []
        try:
            full = service.is_full()
            service._row_seconds = 9.5
            for count in (1, 4):
                assert service.metrics.prompt_tokens._value.get() == 0
                with pytest.raises(Refusal) as one:
                    await whole(service, {"prompt": "the", "n": count})
                refused.append(one.value)
        finally:
            goes_on.set()
        await first
        await pieces.aclose()
        before = service.metrics.prompt_tokens._value.get()
        found = await whole(service, {"prompt": "the", "n": 3})
        read = service.metrics.prompt_tokens._value.get() - before
        assert read == 3 * found["usage"]["prompt_tokens"] > 0
        return *refused, (full, service.is_full())

    now, always, full = serving(generator, use, max_waiting=1)
    assert full == (True, False)
    assert (now.status, now.headers["retry-after"]) == (429, "5")  # half a round of answers in two rows
    assert (always.status, always.headers) == (400, {})


def test_prompts_are_refused_until_the_model_is_there_and_while_the_service_ends(generator):
    may_load = threading.Event()

    def load():
        may_load.wait()
        return generator

    async def use(service):
        with pytest.raises(Refusal, match="is being loaded") as early:
            service.admit()
        may_load.set()
        await service.loaded.wait()
        service.admit()
        service.draining = True
        with pytest.raises(Refusal, match="is ending") as late:
            service.admit()
        return early.value.status, late.value.status

    assert serving(generator, use, load) == (503, 503)


def test_an_engine_that_fails_fails_its_requests_and_a_prompt_that_fails_fails_alone(generator, monkeypatch):
    async def nan(service):
        def broken(*arguments):
            raise UserError("not finite")

        with monkeypatch.context() as patch:
            patch.setattr(generator, "result", broken)
            with pytest.raises(Refusal) as refused:
                await filled(service, {"prompt": PROMPTS[0]})
        return refused.value.status, str(refused.value)

    status, message = serving(generator, nan)
    assert status == 500
    assert "not finite" not in message  # it is in the log

    async def one_fails(service):
        def broken(number, prompt):
            raise UserError("no such text")

        with monkeypatch.context() as patch:
            patch.setattr(generator, "text_stream", broken)
            with pytest.raises(Refusal, match="no such text"):
                await filled(service, {"prompt": PROMPTS[0]})
        return await filled(service, {"prompt": PROMPTS[0]})

    assert serving(generator, one_fails)[0]["results"]

    async def all_fail(service):
        def broken():
            raise MemoryError("gone")

        service.worker._commands.put(Command(broken, dict))
        with pytest.raises(Refusal) as refused:
            await filled(service, {"prompt": PROMPTS[0]})
        await service.ended.wait()
        return refused.value.status, service.not_ready()

    assert serving(generator, all_fail) == (500, "the model has failed")


def test_a_reload_that_fails_in_any_way_can_be_asked_for_again(generator, monkeypatch, caplog):
    def ends():
        raise SystemExit("no such model")

    async def use(service):
        reloaded = asyncio.Queue()
        own = service._reloaded
        monkeypatch.setattr(service, "_reloaded", lambda error: reloaded.put_nowait(own(error)))
        for load in (ends, lambda: generator):
            service.worker.open_generator = load
            service.reload()
            await asyncio.wait_for(reloaded.get(), 60)
        held = threading.Event()
        service.worker.open_generator = held.wait
        service.reload()
        service.worker.stop()
        await service.ended.wait()
        held.set()
        return service._is_reloading

    caplog.set_level("INFO")
    assert not serving(generator, use)
    assert "the old model answers: no such model" in caplog.text
    assert "loaded again: new prompts" in caplog.text


def test_a_long_call_does_not_hold_tokens_up(generator):
    async def use(service):
        service.worker.report_seconds, kept = 1e9, []
        loaded = service.worker._loaded[-1]
        with held(service):
            answering = asyncio.ensure_future(filled(service, {"prompt": PROMPTS[0], "min_len": 8, "stream": True}))
            await until(lambda: service.num_asked)
            for _ in range(4):  # a step between any two of them
                service.worker.call(lambda: kept.append(len(loaded.unreported)), {}, lambda: True)
        await answering
        return kept

    assert serving(generator, use) == [0] * 4


def test_a_request_has_its_time(generator):
    async def use(service):
        pieces = service.answer([encode(service, PROMPTS[0], {"min_len": 8}, {}, 1, stream=True)])
        with held(service):
            with pytest.raises(Refusal) as refused:
                await anext(pieces)
            with pytest.raises(Refusal):  # it waits as long
                await service.call((list, {}))
        return refused.value.status, service.num_asked

    assert serving(generator, use, request_timeout=0.05) == (504, 0)
