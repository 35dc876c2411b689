"""The benchmark of the service counts and times what a server of known answers sends, and runs as a whole."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARK = ROOT / "scripts" / "benchmark" / "serve.py"
sys.path.insert(0, str(BENCHMARK.parent))

from http_load import Outcome, Target, arrivals, ask, figures, load  # noqa: E402
from serve import problems_of  # noqa: E402

USAGE = {"prompt_tokens": 3, "completion_tokens": 4}


def event(**content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(words: str) -> bytes:
    return event(choices=[{"text": words}])


WHOLE = text("a") + text("b") + text("") + text("c") + event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"


async def against(answer: bytes, status: int, use):
    """What `use(target)` returns, beside a server that sends these bytes in chunks of five and then waits."""
    met: list[bytes] = []

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        met.append(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
        parts = [answer[start : start + 5] for start in range(0, len(answer), 5)]
        writer.write(b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts))
        if answer is WHOLE or status != 200:
            writer.write(b"0\r\n\r\n")
        else:
            await reader.read()  # until the client leaves
        writer.close()

    server = await asyncio.start_server(answered, "127.0.0.1", 0)
    async with server:
        return await use(Target(server.sockets[0].getsockname()[1], {"seed": 1})), met


@pytest.mark.parametrize(
    ("answer", "status", "cancel_after", "expected"),
    [
        (WHOLE, 200, None, ("completed", 3)),
        (text("a"), 200, 0.05, ("cancelled", 1)),
        (b"full", 429, None, ("shed", 0)),
        (b"no", 400, None, ("failed", 0)),
        (text("a") + event(error={"message": "broken"}), 200, None, ("failed", 1)),
    ],
)
def test_the_end_of_a_request(answer, status, cancel_after, expected):
    outcome, (body,) = asyncio.run(against(answer, status, lambda target: ask(target, {"prompt": "x"}, cancel_after)))
    assert (outcome.status, len(outcome.events)) == expected
    assert json.loads(body) == {"seed": 1, "prompt": "x", "stream": True}
    assert (outcome.completion_tokens == 4) == (outcome.status == "completed")


def test_a_load_answers_all_and_nobody_listening_fails():
    bodies = [{"prompt": str(number)} for number in range(6)]
    (outcomes, seconds), met = asyncio.run(against(WHOLE, 200, lambda target: load(target, bodies, clients=2)))
    assert [one.status for one in outcomes] == ["completed"] * 6
    assert seconds >= max(one.ended for one in outcomes) - min(one.began for one in outcomes)
    assert sorted(json.loads(body)["prompt"] for body in met) == [body["prompt"] for body in bodies]
    assert asyncio.run(ask(Target(1, {}), {})).error.startswith("ConnectionRefusedError")


def test_arrivals_are_a_poisson_process_of_the_rate():
    pauses = list(itertools.islice(arrivals(50.0, seed=1), 20_000))
    mean = sum(pauses) / len(pauses)
    assert mean == pytest.approx(0.02, rel=0.03)
    assert sum((one - mean) ** 2 for one in pauses) / len(pauses) == pytest.approx(mean**2, rel=0.1)
    assert pauses[:9] == list(itertools.islice(arrivals(50.0, seed=1), 9))


def test_figures_of_known_times():
    first = Outcome(0.0, 1.0, "completed", events=[0.2, 0.4, 1.0], prompt_tokens=5, completion_tokens=5)
    second = Outcome(1.0, 2.0, "completed", events=[1.4, 2.0], prompt_tokens=1, completion_tokens=2)
    refused = Outcome(1.0, 1.1, "shed", "429")
    found = figures([first, second, refused], 4.0, {"ttft": 300.0})
    assert (found["num_prompts"], found["completed"], found["shed"]) == (3, 2, 1)
    assert (found["output_throughput"], found["total_token_throughput"]) == (7 / 4, 13 / 4)
    assert found["request_goodput"] == 1 / 4  # the second's first text came after 400 ms
    assert found["mean_ttft_ms"] == pytest.approx(300.0)
    assert found["median_itl_ms"] == pytest.approx(600.0)  # of 200, 600 and 600
    assert found["mean_tpot_ms"] == pytest.approx((800 / 4 + 600 / 1) / 2)
    assert found["p99_e2el_ms"] == pytest.approx(1000.0)
    assert found["tokens_per_event"] == pytest.approx(7 / 5)
    assert found["errors"] == ["429"]


@pytest.mark.parametrize(
    ("last", "counts", "left", "problem"),
    [
        ({}, {"completed": 1}, 0, None),
        ({"rss_mb": 131.0}, {"completed": 1}, 0, "memory"),
        ({"rss_mb": 131.0, "seconds": 9.0}, {"completed": 1}, 0, None),
        ({"threads": 36}, {"completed": 1}, 0, "threads"),
        ({"files": 9}, {"completed": 1}, 0, "files"),
        ({}, {"completed": 1, "failed": 2}, 0, "2 requests failed"),
        ({}, {"cancelled": 1}, 0, "no request"),
        ({}, {"completed": 1}, 3, "3 prompts are left"),
    ],
)
def test_a_soak_says_what_has_grown(last, counts, left, problem):
    usual = {"seconds": 1.0, "rss_mb": 100.0, "threads": 3, "files": 8}
    found = problems_of([usual, usual, {**usual, "seconds": 61.0, **last}], counts, left)
    assert [problem in one for one in found] == ([] if problem is None else [True])


@pytest.mark.slow
@pytest.mark.parametrize("mode", [["--shares", "0.5"], ["--soak", "4"]], ids=["rates", "soak"])
def test_a_quick_run(test_data, tmp_path, mode):
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(tmp_path / "out.json"), *mode]
    command += ["--text", str(test_data / "english" / "valid.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["saturation"]["share_of_engine"] > 0
    assert found["saturation"]["completed"] == found["saturation"]["num_prompts"] == 12
    if mode[0] == "--soak":
        assert found["soak"]["counts"]["completed"] > 0
    else:
        assert found["rates"][0]["completed"] == 12


@pytest.mark.slow
def test_a_quick_run_of_guides(test_data):
    command = [sys.executable, str(BENCHMARK.with_name("guides.py")), "--rounds", "1", "--tokens", "6", "--rows", "2"]
    done = subprocess.run([*command, "--guides", "regex:[a-z ]+"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"regex:\[a-z \]\+ +processor time x \d+\.\d\d  clock x \d+\.\d\d\n", done.stdout)
