"""ftk-serve under faults: slow and hostile clients, signals under load, a model that is replaced, fails or stalls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ftk
from ftk.generation.engine.engine import Engine
from ftk.serving.prompts import encode
from ftk.serving.refusal import Refusal
from ftk.serving.server import _allow_files
from tests.cli.test_serve import JSON, ask, free_port, said, server
from tests.processes import _main
from tests.serving.services import PROMPTS, causal, filled, held, serving, until
from tests.small_run import save_run

HEAD = b"POST /v1/fill HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def generator(place):
    return ftk.load_generator(place / "run", max_len=8, batch_size=2)


@pytest.fixture(scope="module")
def impatient(place):
    """(port, log) of a service that waits half a second for its clients."""
    with server(place, "--read-timeout", "0.5", "--write-timeout", "0.5") as (_, port, log):
        yield port, log


@contextlib.contextmanager
def connected(port: int):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        yield connection


def received(connection: socket.socket) -> bytes:
    """All until the service closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            found += chunk
    return found


def lines(log) -> list[dict]:
    return [json.loads(line) for line in said(log).splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: local", 408),
        (HEAD + b"Content-Length: 100\r\n\r\n{", 408),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", 408),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n{}", 501),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nno chunk\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\n\r\n", 400),
        (b"GET /version HTTP/1.0\r\n\r\n", 403),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /livez HTTP/1.1\nHost: localhost\nConnection: close\n\n", 200),  # as RFC 9112, 2.2, allows
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n", 200),
    ],
    ids=[
        *("half_head", "half_body", "half_chunks", "two_lengths", "xchunked", "no_chunk", "space", "no_host"),
        *("http_1_0", "tls", "large_head", "bare_lf", "websocket"),
    ],
)
def test_bytes_of_hostile_clients_get_one_answer_and_the_connection_ends(impatient, request_, status):
    port, log = impatient
    with connected(port) as connection:
        connection.sendall(request_)
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert answer.count(b"HTTP/1.1") == 1
    head, _, body = answer.partition(b"\r\n\r\n")
    if status != 200:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    identity = head.partition(b"x-request-id: ")[2][:32].decode()
    assert [line["status"] for line in lines(log) if line["id"] == identity] == [status]
    assert "Traceback" not in said(log)


def test_a_connection_without_a_request_ends_and_so_does_one_that_sends_byte_by_byte(impatient):
    with connected(impatient[0]) as silent, connected(impatient[0]) as slow:
        began = time.monotonic()
        answer = b""
        while not answer and time.monotonic() < began + 30:
            slow.sendall(b"a")
            if select.select([slow], [], [], 0.02)[0]:
                answer = received(slow)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert received(silent) == b""


def test_a_reader_that_stops_is_dropped_while_others_are_answered(impatient):
    with connected(impatient[0]) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000)  # some 15 MB of answers
        gone = select.poll()
        gone.register(connection, 0)  # tells of its end alone
        assert ask(impatient[0], "POST", "/v1/fill", {"prompt": PROMPTS[0]}, JSON)[0] == 200
        assert gone.poll(30_000), "the connection is still open"


@pytest.mark.parametrize("part", [HEAD + b"Content-Length: 100\r\n\r\n{", None], ids=["body", "half_close"])
def test_a_client_that_goes_is_no_failure(impatient, part):
    port, log = impatient

    def gone() -> int:  # lines of other requests may come late
        return sum(line["status"] in (0, 499) for line in lines(log))

    before = gone()
    body = json.dumps({"prompt": ["the [MASK]"] * 30, "min_len": 40}).encode()
    with connected(port) as connection:
        connection.sendall(part or HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connection.shutdown(socket.SHUT_WR)
        assert received(connection) == b""
    deadline = time.monotonic() + 30
    while gone() == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "Traceback" not in said(log)
    assert ask(port, "POST", "/v1/fill", {"prompt": PROMPTS[0]}, JSON)[0] == 200


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_idle_connections_leave_room_for_probes(place, count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + 500:
        pytest.skip(f"{hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 500), hard))
    try:
        with contextlib.ExitStack() as stack:
            _, port, _ = stack.enter_context(server(place, "--read-timeout", "120"))
            for _ in range(count):
                stack.enter_context(connected(port))
            began = time.monotonic()
            assert ask(port, "GET", "/livez", None, {})[0] == 200
            assert time.monotonic() - began < 30
            assert ask(port, "POST", "/v1/fill", {"prompt": PROMPTS[0]}, JSON)[0] == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("limits", "raised", "is_warned"),
    [
        ((1024, 2**20), (65536, 2**20), False),
        ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY), False),
        ((1024, 4096), (4096, 4096), False),
        ((1024, 4095), (4095, 4095), True),
        ((65536, 65536), None, False),
    ],
)
def test_as_many_files_as_allowed_may_be_open_and_few_are_told(monkeypatch, caplog, limits, raised, is_warned):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, own: found.append(own))
    _allow_files()
    assert found == ([] if raised is None else [raised])
    assert ("files may be open" in caplog.text) == is_warned


class Clients:
    """Threads that ask without a pause: (when asked, status or error, text) of each request."""

    def __init__(self, port: int, count: int) -> None:
        self.found: list[tuple[float, int | Exception, str]] = []
        self.stopped = threading.Event()
        self.pool = ThreadPoolExecutor(count)
        self.threads = [self.pool.submit(self._ask, port) for _ in range(count)]

    def _ask(self, port: int) -> None:
        while not self.stopped.is_set():
            began = time.monotonic()
            try:
                status, _, content = ask(port, "POST", "/v1/fill", {"prompt": PROMPTS[0], "min_len": 8}, JSON)
                self.found.append((began, status, content["results"][0]["text"] if status == 200 else ""))
            except OSError as error:
                self.found.append((began, error, ""))
            if self.found[-1][1] != 200:
                return

    def wait_for(self, count: int) -> None:
        """Until this many further requests are answered."""
        count += len(self.found)
        deadline = time.monotonic() + 60
        while len(self.found) < count:
            assert time.monotonic() < deadline, self.found[-1]
            time.sleep(0.01)

    def stop(self) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.result()
        self.pool.shutdown()


def test_sigterm_under_load_loses_nothing_that_was_asked_before(place):
    with server(place, "--batch-size", "2") as (process, port, log):
        clients = Clients(port, 8)
        clients.wait_for(20)
        ended = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        clients.stop()
        assert process.exitcode == 0, said(log)
    # What came just before the signal may be refused, but is answered; a client that was held up before it connected
    # is refused by the system.
    found = [status for began, status, _ in clients.found if began < ended]
    assert {status for status in found if not isinstance(status, ConnectionRefusedError)} <= {200, 503}
    assert sum(status == 200 for began, status, _ in clients.found) >= 20
    assert "Traceback" not in said(log)


def test_a_second_sigterm_ends_streams_by_an_error_event(place):
    with server(place, "--batch-size", "1") as (process, port, log), connected(port) as connection:
        body = json.dumps({"prompt": ["the [MASK]"] * 32, "min_len": 40, "stream": True}).encode()
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = connection.recv(65536)
        os.kill(process.pid, signal.SIGTERM)
        while ask(port, "GET", "/readyz", None, {})[0] == 200:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGTERM)
        answer += received(connection)
        process.join(60)
        assert process.exitcode == 0, said(log)
    assert b"[DONE]" not in answer
    assert b'"the service has ended"' in answer.rpartition(b"data: ")[2]


def test_a_killed_service_starts_again_at_the_same_port(place):
    port = str(free_port())
    for _ in range(2):
        with server(place, "--port", port) as (process, _, _), connected(int(port)) as connection:
            body = json.dumps({"prompt": ["the [MASK]"] * 32, "min_len": 40, "stream": True}).encode()
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            os.kill(process.pid, signal.SIGKILL)
            process.join(60)
            assert b"[DONE]" not in received(connection)


def test_sighup_takes_a_newer_checkpoint_without_refusing_anything_and_keeps_the_old_one_where_it_cannot(
    made_place, tmp_path
):
    shutil.copytree(made_place, tmp_path, dirs_exist_ok=True)
    with server(tmp_path) as (process, port, log):
        clients = Clients(port, 4)
        clients.wait_for(10)

        def hang_up(message: str) -> None:
            told = said(log).count(message)
            os.kill(process.pid, signal.SIGHUP)
            deadline = time.monotonic() + 60
            while said(log).count(message) == told:
                assert time.monotonic() < deadline, said(log)
                time.sleep(0.01)

        def answer() -> str:
            return ask(port, "POST", "/v1/fill", {"prompt": PROMPTS[0], "min_len": 8}, JSON)[2]["results"][0]["text"]

        old = answer()
        save_run(tmp_path / "run" / "checkpoint_2", tmp_path / "data-bin", seed=1)
        hang_up("answered by the new model")
        new = answer()
        clients.wait_for(10)
        clients.stop()
        assert {status for _, status, _ in clients.found} == {200}
        assert {text for _, _, text in clients.found} == {old, new}
        expected = ftk.load_generator(tmp_path / "run", max_len=40).generate(PROMPTS[0], options={"min_len": 8})
        assert (old != new, new) == (True, expected.text)

        save_run(tmp_path / "run" / "checkpoint_3", tmp_path / "other-bin")
        hang_up("another tokenizer")
        save_run(tmp_path / "run" / "checkpoint_4", tmp_path / "data-bin")
        for file in (tmp_path / "run" / "checkpoint_4").rglob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:100])
        hang_up("not loaded again")
        assert answer() == new
        assert process.exitcode is None


def one_fails(words, folder, streams, environment):
    """A service whose causal model fails at its next step once there is a file "fails"."""
    step = Engine.step

    def broken(engine):
        if os.path.exists("fails") and "gpt" in type(engine.decoder.models[0]).__module__:
            raise RuntimeError("no such kernel")
        return step(engine)

    Engine.step = broken
    _main(words, folder, streams, environment)


def test_of_two_models_both_are_loaded_again_and_one_that_fails_leaves_the_other(made_place, tmp_path):
    shutil.copytree(made_place, tmp_path, dirs_exist_ok=True)
    causal(tmp_path / "gpt", tmp_path / "data-bin" / "tokenizer")
    with server(tmp_path, "--models", "gpt=gpt", main=one_fails) as (process, port, log):

        def status(path, body=None):
            return ask(port, "POST" if body else "GET", path, body, JSON)[::2]

        save_run(tmp_path / "run" / "checkpoint_2", tmp_path / "data-bin", seed=1)
        os.kill(process.pid, signal.SIGHUP)
        deadline = time.monotonic() + 60
        while not all(f"{name}: loaded again" in said(log) for name in ("run", "gpt")):
            assert time.monotonic() < deadline, said(log)
            time.sleep(0.01)
        expected = ftk.load_generator(tmp_path / "run", max_len=40).generate(PROMPTS[0], options={"min_len": 8})
        body = {"prompt": PROMPTS[0], "min_len": 8}
        assert status("/v1/fill", body)[1]["results"][0]["text"] == expected.text
        assert status("/livez") == status("/readyz") == (200, {"status": "ok"})

        (tmp_path / "fails").touch()
        assert status("/v1/fill", {"prompt": "the", "model": "gpt"})[0] == 500
        assert [status("/v1/fill", {**body, "model": name})[0] for name in ("run", "gpt")] == [200, 503]
        assert status("/livez") == status("/readyz") == (503, {"status": "gpt: the model has failed"})
        assert "no such kernel" in said(log)
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        assert process.exitcode == 1, said(log)


def test_a_step_without_end_is_seen(generator):
    async def use(service):
        may_end = threading.Event()
        before = service.not_alive()
        call = asyncio.ensure_future(service.call((may_end.wait, {})))
        while (found := service.not_alive()) is None:
            await asyncio.sleep(0.01)
        ready = service.not_ready()
        may_end.set()
        await call
        while service.not_alive() is not None:  # until the thread waits for the next prompt
            await asyncio.sleep(0.01)
        return before, found, ready

    before, found, ready = serving(generator, use, stall_timeout=0.02)
    assert (before, ready) == (None, None)
    assert "in one step" in found


def test_logits_that_are_not_finite_fail_their_request_alone(generator, caplog):
    (expected,) = generator.generate([PROMPTS[0]], seeds=[1])

    async def use(service):
        decoder = service.worker._loaded[-1].engine.decoder
        step, rows = decoder.step, []

        def broken(tokens):
            logits = step(tokens)
            if len(logits) == 2 and not rows:
                rows.append(0)
                logits[0] = torch.nan
            return logits

        decoder.step = broken
        bodies = [{"prompt": PROMPTS[0], "seed": 1, "min_len": 0} for _ in range(2)]
        with held(service):  # until both wait, so that they enter together
            asked = [asyncio.ensure_future(filled(service, body)) for body in bodies]
            await until(lambda: service.num_asked == 2)
        found = await asyncio.gather(*asked, return_exceptions=True)
        decoder.step = step
        return found, await filled(service, bodies[0])

    (failed, other), after = serving(generator, use)
    assert isinstance(failed, Refusal)
    assert failed.status == 500
    assert "not finite" in caplog.text
    assert [one[-1]["results"][0]["text"] for one in (other, after)] == [expected.text] * 2


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_clients_that_leave_at_any_time_leave_all_rows_free(generator, count):
    chance = random.Random(3)

    async def use(service):
        prompts = [encode(service, prompt, {}, {}, 1, stream=True) for prompt in PROMPTS]

        async def client(share: int) -> None:
            for _ in range(share):
                pieces = service.answer(chance.choices(prompts, k=chance.randint(1, 3)))
                for _ in range(chance.randint(0, 3)):
                    with contextlib.suppress(StopAsyncIteration):
                        await asyncio.wait_for(anext(pieces), chance.choice([0.0005, 60]))
                await pieces.aclose()

        async def tolerant(share: int) -> None:
            for _ in range(share):
                with contextlib.suppress(asyncio.TimeoutError):  # left while it waited
                    await client(1)

        await asyncio.gather(*(tolerant(count // 10) for _ in range(10)))
        (loaded,) = service.worker._loaded
        while (await service.call((lambda: loaded.engine.is_busy, {})))[0]:  # what was cancelled may leave a last step
            pass
        return sorted(loaded.engine._free), loaded.streams, service.worker._numbers, service.num_asked

    assert serving(generator, use) == ([0, 1], {}, {}, 0)


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_the_service(place):
    import subprocess
    import sys

    manager, terminal = os.openpty()
    command = [sys.executable, "-m", "ftk_cli", "serve", "--path", "run", "--port", "0"]
    with (place / "of_terminal").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", OF_TERMINAL, str(terminal), *command], cwd=place, stderr=log, pass_fds=[terminal]
        )
    os.close(terminal)
    try:
        deadline = time.monotonic() + 120
        while "answers at" not in said(place / "of_terminal"):
            assert process.poll() is None, said(place / "of_terminal")
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.close(manager)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


OF_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0)
os.close(int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""
