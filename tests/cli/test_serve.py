"""ftk-serve over HTTP: routes, guards, OpenAI's client, and its end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import ftk
from ftk.models import build_model
from ftk.tokenizers import load_tokenizer
from ftk_cli import serve
from ftk_cli.launch import free_port
from tests.generation.test_adapted import save_adapter
from tests.processes import _main, forked
from tests.serving.services import causal
from tests.serving.test_chat import make_chat_model
from tests.small_run import SHAPE, save_model, save_run

KEY = "a key"
JSON = {"content-type": "application/json"}
OPEN = {**JSON, "authorization": f"Bearer {KEY}"}
RANKS = ("--launch", "2", "--tensor-parallel-size", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def place(place):
    (place / "keys").write_text(f"another\n{KEY}\n")
    return place


@contextmanager
def server(place: Path, *arguments: str, main: Callable[..., object] = _main):
    """(process, port, file of what it says) of a service of the place's run, in a process that `main` begins."""
    streams = [place / "stdin", place / "stdout", place / f"stderr_{time.monotonic_ns()}"]
    streams[0].touch()
    words = ["ftk-serve", "--path", "run", "--port", "0", "--max-len", "40", "--num-threads", "1", *arguments]
    process = forked(main, words, os.fspath(place), [*map(str, streams)], None)
    process.start()
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"answers? at http://127.0.0.1:(\d+)", said(streams[2]))):
            assert process.exitcode is None, said(streams[2])
            assert time.monotonic() < deadline, said(streams[2])
            time.sleep(0.02)
        yield process, int(found[1]), streams[2]
    finally:
        process.kill()
        process.join()


def said(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@pytest.fixture(scope="module")
def port(place):
    with server(place, "--api-key-file", "keys", "--max-body", "20000") as (_, port, _):
        yield port


def ask(port: int, method: str, path: str, body: object = None, headers: dict[str, str] = OPEN):
    """Status, headers and body of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    is_json = response.headers["content-type"] == "application/json"
    return response.status, response.headers, json.loads(content) if is_json else content.decode()


def test_openais_client(port):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == ["run"]
    request = {"model": "run", "prompt": "the quick brown", "temperature": 0, "max_tokens": 6}
    whole = client.completions.create(**request, suffix=" a lazy dog", logprobs=2)
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert len(whole.choices[0].logprobs.tokens) <= 6
    pieces = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    plain = client.completions.create(**request)
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == plain.choices[0].text
    assert pieces[-1].usage.total_tokens == plain.usage.total_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**request, extra_body={"topp": 1})
    assert refused.value.param == "topp"
    assert refused.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/", None, {}, 200),
        ("GET", "/livez", None, {}, 200),
        ("GET", "/readyz", None, {}, 200),
        ("GET", "/health", None, {}, 200),
        ("GET", "/livez", None, {"host": "10.1.2.3:8000"}, 200),  # as a probe of Kubernetes asks
        ("GET", "/readyz", None, {"host": "10.1.2.3:8000"}, 200),
        ("GET", "/version", None, {**OPEN, "host": "10.1.2.3:8000"}, 403),
        ("GET", "/version", None, OPEN, 200),
        ("GET", "/version", None, {}, 401),
        ("GET", "/metrics", None, OPEN, 200),
        ("GET", "/metrics", None, {}, 401),
        ("GET", "/v1/models/run", None, OPEN, 200),
        ("GET", "/v1/models/other", None, OPEN, 404),
        ("GET", "/v1/models", None, {"authorization": f"Bearer {KEY}x"}, 401),
        ("GET", "/../../etc/passwd", None, OPEN, 404),
        ("GET", "/%2e%2e/%00", None, OPEN, 404),
        ("GET", "/v1/fill", None, OPEN, 405),
        ("POST", "/v1/models", b"", {"authorization": f"Bearer {KEY}"}, 405),
        ("DELETE", "/v1/requests/none", None, OPEN, 404),
        ("DELETE", "/v1/requests/none", None, {}, 401),
        ("POST", "/tokenize", {"prompt": "the fox"}, OPEN, 200),
        ("POST", "/tokenize", {"prompt": "the fox", "model": "other"}, OPEN, 404),
        ("POST", "/detokenize", {"tokens": [20, 21]}, OPEN, 200),
        ("POST", "/detokenize", {"tokens": [20], "model": "other"}, OPEN, 404),
        ("POST", "/detokenize", {"tokens": [10**6]}, OPEN, 400),
        ("POST", "/v1/fill", {"prompt": "the [MASK]"}, {**OPEN, "content-type": "text/plain"}, 415),
        ("POST", "/v1/fill", {"prompt": "the [MASK]"}, {**OPEN, "host": "evil.example"}, 403),
        ("POST", "/v1/fill", {"prompt": "the [MASK]"}, {**OPEN, "origin": "http://evil.example"}, 403),
        ("POST", "/v1/fill", {"prompt": "the [MASK]"}, {**OPEN, "origin": "null"}, 403),
        ("POST", "/v1/fill", {"prompt": "the [MASK]"}, {**OPEN, "origin": "https://localhost:8443"}, 200),
        ("POST", "/v1/fill", b'{"prompt": NaN}', OPEN, 400),
        ("POST", "/v1/fill", {"prompt": "a" * 30_000}, OPEN, 413),
        ("POST", "/v1/fill", {"prompt": "the", "top_k": 3}, OPEN, 400),
        ("POST", "/v1/score", {"prompt": "the [MASK]", "candidates": [["fox", "dog"]]}, OPEN, 400),
    ],
)
def test_routes_and_guards(port, method, path, body, headers, status):
    found, answered, content = ask(port, method, path, body, headers)
    assert found == status, content
    if status >= 400 and answered["content-type"] == "application/json":
        assert set(content["error"]) == {"message", "type", "param", "code"}
        assert answered["x-request-id"]


def test_named_origins_and_hosts_may_ask_metrics_may_be_public_and_the_page_may_be_left_out(place):
    origin = "https://app.example:8443"
    options = ("--api-key-file", "keys", "--cors-origins", origin, "--metrics-public", "--no-playground")
    with server(place, *options, "--allowed-hosts", "behind.example") as (_, port, _):
        asks = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,x-stainless-lang",
        }
        for method, path, headers, expected in [
            ("OPTIONS", "/v1/fill", asks, (200, origin)),
            ("OPTIONS", "/v1/fill", {**asks, "origin": "https://evil.example"}, (400, None)),
            ("POST", "/v1/fill", {**OPEN, "origin": origin}, (200, origin)),
            ("POST", "/v1/fill", {**JSON, "origin": origin}, (401, origin)),
            ("POST", "/v1/fill", {**OPEN, "origin": "https://evil.example"}, (403, None)),
            ("POST", "/v1/fill", {**OPEN, "host": "Behind.example:80"}, (200, None)),
            ("POST", "/v1/fill", {**OPEN, "host": "evil.example"}, (403, None)),
            ("GET", "/metrics", {}, (200, None)),
            ("GET", "/", {}, (404, None)),
        ]:
            body = {"prompt": "the [MASK]"} if method == "POST" else None
            status, found, _ = ask(port, method, path, body, headers)
            assert (status, found["access-control-allow-origin"]) == expected, (method, path)


def test_models_side_by_side_answer_as_each_alone(place):
    save_adapter(place / "law", ftk.load_model(place / "run", "cpu"), ("output",), 0)
    alone = {
        "run": ftk.load_generator(place / "run", "cpu", max_len=8),
        "law": ftk.load_generator(place / "law", "cpu", base=place / "run", max_len=8),
        "gpt": causal(place / "gpt", place / "other-bin" / "tokenizer"),
    }
    alone["own"] = alone["law"]  # an adapter as a model of its own, with the model of --path as its base
    text, candidates = "the quick brown", [["fox"], ["dog"]]
    options = ("--max-len", "8", "--adapters", "law=law", "--models", "gpt=gpt", "own=law")

    with server(place, *options) as (_, port, log), ThreadPoolExecutor() as pool:

        def asked(path: str, field: str, **body: object) -> dict[str, object]:
            answers = {name: pool.submit(ask, port, "POST", path, {**body, "model": name}) for name in alone}
            return {name: one.result()[2][field] for name, one in answers.items()}

        expected = {name: own.generate(text).text for name, own in alone.items()}
        assert {name: one["text"] for name, (one,) in asked("/v1/fill", "results", prompt=text).items()} == expected
        ((unnamed,),) = ask(port, "POST", "/v1/fill", {"prompt": text})[2].values()
        assert unnamed["text"] == expected["run"]
        found = asked("/v1/completions", "choices", prompt=text, temperature=0, max_tokens=8)
        assert {name: text + one["text"] for name, (one,) in found.items()} == expected
        for name, scored in asked("/v1/score", "candidates", prompt=text, candidates=candidates).items():
            (own,) = alone[name].score_encoded([alone[name].encode_candidates(text, candidates, True)])
            logprobs = [[answer["logprob"] for answer in one] for one in scored]
            assert logprobs == [pytest.approx([answer.logprob for answer in one], abs=1e-4) for one in own]
        tokens = asked("/tokenize", "tokens", prompt=text, add_special_tokens=False)
        assert tokens == {name: list(own.tokenizer.encode(text)) for name, own in alone.items()}
        texts = {name: ask(port, "POST", "/detokenize", {"tokens": tokens[name], "model": name})[2] for name in alone}
        assert all(one == {"prompt": text} for one in texts.values())

        listed = ask(port, "GET", "/v1/models")[2]["data"]
        parents = [(one["id"], one["parent"]) for one in listed]
        assert parents == [("run", None), ("law", "run"), ("gpt", None), ("own", None)]
        assert [len(one["generation"]["gaps"]) for one in listed] == [3, 3, 0, 3]
        assert ask(port, "GET", "/v1/models/gpt")[2] == listed[2]
        for method, path, body in [("GET", "/v1/models/x", None), ("POST", "/v1/fill", {"prompt": text, "model": "x"})]:
            status, _, refused = ask(port, method, path, body)
            assert (status, refused["error"]["code"]) == (404, "model_not_found")
            assert "there is: run, law, gpt, own" in refused["error"]["message"]
        metrics = ask(port, "GET", "/metrics")[2].splitlines()
        assert {line for line in metrics if line.startswith("ftk_requests_finished_total")} > {
            'ftk_requests_finished_total{finish_reason="length",model="gpt"} 2.0'
        }
        assert 'ftk_requests_total{route="/v1/score",status="200"} 4.0' in metrics
        assert len({line for line in metrics if line.startswith("# TYPE")}) == sum(
            one[:6] == "# TYPE" for one in metrics
        )
        assert "run, gpt, own answer at" in said(log)


def test_headers_have_a_limit(port):
    try:
        status = ask(port, "GET", "/readyz", None, {"x": "a" * 200_000})[0]
    except ConnectionError:  # closed before all of it was sent
        status = 431
    assert status == 431
    assert ask(port, "GET", "/readyz")[0] == 200


def test_a_length_and_chunks_together_are_refused(port):
    request = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    request += (
        "Content-Type: application/json\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / "
    )
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request.encode())
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    assert received.startswith(b"HTTP/1.1 400")
    assert received.count(b"HTTP/1.1") == 1


def test_sigterm_answers_what_runs_and_ends_with_0(place):
    with server(place, "--batch-size", "1") as (process, port, log):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        texts = ["the quick brown fox [MASK]"] * 16  # so that a fast machine is not through before the signal
        connection.request("POST", "/v1/fill", json.dumps({"prompt": texts, "min_len": 40, "stream": True}), JSON)
        response = connection.getresponse()
        events = [response.readline()]
        os.kill(process.pid, signal.SIGTERM)
        # The service still listens, and says why it takes nothing.
        while (status := ask(port, "POST", "/v1/fill", {"prompt": "a [MASK]"}, JSON)[0]) == 200:
            time.sleep(0.01)
        assert status == 503
        events += response.read().split(b"\n\n")
        process.join(60)
        assert process.exitcode == 0, said(log)
    results = [event for event in events if b'"type":"result"' in event]
    assert len(results) == len(texts)
    told = [line for line in said(log).splitlines() if line.startswith("ftk-serve: ")]
    assert told[-2].startswith("ftk-serve: SIGTERM: answering what was accepted, then ending; at most ")
    assert told[-1] == "ftk-serve: ended"
    lines = [json.loads(line) for line in said(log).splitlines() if line.startswith("{")]
    assert {line["status"] for line in lines} >= {200, 503}


def test_sighup_reads_the_keys_again_and_keeps_those_of_before_where_it_cannot(place):
    keys = place / "changing_keys"
    keys.write_text("old\n")
    with server(place, "--api-key-file", keys.name) as (process, port, log):

        def told_after(text: str, message: str) -> list[int]:
            keys.write_text(text)
            os.kill(process.pid, signal.SIGHUP)
            deadline = time.monotonic() + 60
            while message not in said(log):
                assert time.monotonic() < deadline, said(log)
                time.sleep(0.01)
            return [ask(port, "GET", "/version", None, {"authorization": f"Bearer {key}"})[0] for key in ("old", "new")]

        assert told_after("", "changing_keys holds no key") == [200, 401]
        assert told_after("new\n", "loaded again") == [401, 200]


@pytest.mark.slow
def test_two_ranks_answer_as_one_process_and_end_together(place, port):
    bodies = [{"prompt": text, "seed": 3, "max_len": 12} for text in ("the quick [MASK] fox", "a [MASK] dog [MASK] .")]
    bodies += [{**body, "sampling": True, "top_k": 5} for body in bodies]
    with server(place, *RANKS) as (process, shared, log):
        with socket.create_connection(("127.0.0.1", shared)) as leaves:  # a client that does not wait for its answer
            content = json.dumps({"prompt": "the [MASK] fox", "stream": True, "min_len": 40})
            head = "POST /v1/fill HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            leaves.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
            assert leaves.recv(15) == b"HTTP/1.1 200 OK"  # it is being answered
        for body in bodies:
            found, expected = (ask(one, "POST", "/v1/fill", body)[2]["results"][0] for one in (shared, port))
            assert found["text"] == expected["text"]
            for answer, other in zip(found["answers"], expected["answers"], strict=True):
                assert answer["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        scores = {"prompt": "the [MASK]", "candidates": [["fox"], ["dog"]]}
        assert [len(ask(one, "POST", "/v1/score", scores)[2]["candidates"]) for one in (shared, port)] == [2, 2]
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        assert process.exitcode == 0, said(log)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_others(place, rank):
    psutil = pytest.importorskip("psutil")
    with server(place, *RANKS) as (process, _, log):
        ranks = {int(one.environ()["RANK"]): one for one in psutil.Process(process.pid).children()}
        ranks[rank].kill()
        process.join(60)
        assert process.exitcode == 1, said(log)
        assert not any(one.is_running() for one in ranks.values())


def slow_to_load(words: list[str], folder: str, streams: list[str]) -> None:
    from ftk.serving import server

    serve.open_generator, server._LAST_STEP = lambda *arguments: time.sleep(600), 0.1
    _main(words, folder, streams, None)


def test_sigterm_while_the_model_is_loaded(place):
    streams = [place / "stdin", place / "stdout", place / "stderr_loading"]
    streams[0].touch()
    port = free_port()
    process = forked(
        slow_to_load, ["ftk-serve", "--path", "run", "--port", str(port)], os.fspath(place), [*map(str, streams)]
    )
    process.start()
    try:
        deadline = time.monotonic() + 120
        while (status := answered(port)) is None:
            assert time.monotonic() < deadline, said(streams[2])
            time.sleep(0.02)
        assert status == 503
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        assert process.exitcode == 0, said(streams[2])
    finally:
        process.kill()
        process.join()
    assert "answers at" not in said(streams[2])


def answered(port: int) -> int | None:
    """The status of /readyz; None where nobody listens."""
    try:
        return int(ask(port, "GET", "/readyz")[0])
    except ConnectionError:
        return None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "no key"),
        (("--host", "192.0.2.1", "--open-access"), "cannot listen at 192.0.2.1"),  # no machine has it
        (("--api-key-file", "nothing"), "--api-key-file nothing"),
        (("--port", "70000"), "port is 70000"),
        (("--cors-origins", "*"), "--cors-origins: * must be an address"),
        (("--max-len", "0"), "--max-len is 0; it must be at least 1"),
        (("--max-waiting", "0"), "--max-waiting is 0; it must be at least 1"),
        (("--max-prompts", "0"), "--max-prompts is 0; it must be at least 1"),
        (("--max-body", "0"), "--max-body is 0; it must be at least 1"),
        (("--max-context", "1"), "--max-context is 1; it must be at least 2"),
        (("--blank-order", "confident"), "--blank-order"),
        (("--adapters", "nothing"), "must be NAME=FOLDER"),
        (("--adapters", "run=nothing"), "is the name of the model itself"),
        (("--adapters", "a=keys", "a=keys"), "two have the same name"),
        (("--adapters", "a=keys"), "--adapters a=keys: there is no such folder"),
        (
            ("--adapters", "a=run"),
            "--adapters a=run: is no adapter (no adapter_config.json); give the folder of an adapter alone, which "
            "ftk-checkpoint adapter RUN DST writes",
        ),
        (("run",), "unexpected argument 'run'; a model is given by --path; see ftk-serve --help"),
        (("--adapters", "a=keys", "--base", "run"), "give the model as --path"),
        (("--max-context", "1000000000"), "more than cpu has"),
        (("--models", "nothing"), "--models: nothing must be NAME=FOLDER"),
        (("--models", "run=run"), "--models: run is the name of the model itself"),
        (("--models", "a=run", "a=run"), "--models: two have the same name"),
        (("--models", "a=run", "--adapters", "a=keys"), "--models: a is the name of an adapter, too"),
        (("--models", "a=nothing"), "--models a=nothing: nothing: no such folder"),
        (("--models", "a=run", *RANKS[2:]), "--models: several processes can share one model only"),
        (("--models", "a=run", "--max-context", "1000000000"), "run: keys and values"),
    ],
)
def test_mistakes(place, capfd, monkeypatch, arguments, message):
    monkeypatch.chdir(place)
    assert serve.main(["--path", "run", "--port", "0", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_a_model_that_is_not_finite_is_refused_at_the_start(place, capfd, monkeypatch):
    save_run(place / "nan" / "checkpoint_1", place / "data-bin", nan=True)
    monkeypatch.chdir(place)
    assert serve.main(["--path", "nan", "--port", "0"]) == 2
    assert "finite" in capfd.readouterr().err


def test_a_model_that_writes_no_answers_is_refused_without_their_length(place, tmp_path, capfd):
    tokenizer = place / "data-bin" / "tokenizer"
    model = build_model("bert", vocab_size=load_tokenizer(tokenizer).padded_vocab_size(), **SHAPE)
    save_model(tmp_path / "checkpoint_1", model, tokenizer, task={"_name": "masked_lm"})
    assert serve.main(["--path", str(tmp_path), "--port", "0"]) == 2
    loading, refused = capfd.readouterr().err.splitlines()
    assert loading.endswith("checkpoint_1")
    assert "this model writes no answers token by token" in refused


def test_a_port_that_is_taken(place, capfd, monkeypatch):
    monkeypatch.chdir(place)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert serve.main(["--path", "run", "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --port" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("positions", "arguments", "longest"),
    [(512, [], 256), (512, ["--max-len", "24"], 24), (128, [], 128), (None, [], 24)],
    ids=["long", "given", "all", "blanks"],
)
def test_answers_are_long_by_default_as_far_as_there_are_positions(
    place, tmp_path, monkeypatch, positions, arguments, longest
):
    if positions is not None:
        make_chat_model(tmp_path, max_positions=positions)
    found = []
    monkeypatch.setattr(serve, "_answer", lambda roots, *others: found.append(roots["run"].generation.max_len))
    path = (place if positions is None else tmp_path) / "run"
    assert serve.main(["--path", str(path), "--device", "cpu", *arguments]) == 0
    assert found == [longest]
