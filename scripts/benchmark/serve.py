"""The service under load: requests over loopback, against its engine alone, and against `transformers serve`.

    python scripts/benchmark/serve.py                            # glm_base: saturation, then rates of arrival
    python scripts/benchmark/serve.py --arch glm_tiny
    python scripts/benchmark/serve.py --arch gpt2 --peer venv/bin/python   # 1, 8, 32 clients, the same weights
    python scripts/benchmark/serve.py --arch glm_tiny --soak 600
    python scripts/benchmark/serve.py --quick                    # few requests: whether everything runs
    python scripts/benchmark/serve.py --all --peer venv/bin/python   # the table of docs/performance.md, some 5 minutes

Weights are random; prompts are beginnings of real lines, and the lengths of prompts and answers are drawn once, from a
fixed seed. No answer ends before its length. Server and client are processes of their own; the server has --threads.

Saturation: all requests come at once; output tokens/s of the service, against those of its engine in this process with
the same requests, streamed, in turn; the share is the median within the rounds. That of processor time says more where
other programs run. Rates: requests come at random times
(Poisson), whether earlier ones are answered or not, at shares of what the service answered at saturation.
Times are those of vLLM's `bench serve`, and so are the keys in --json: ttft from the request to the first text, itl
between events, tpot per token behind the first, e2el to the last byte; a request counts as good within --goodput.

--peer PYTHON, which has transformers[serving]: both servers run, and take turns; each of --clients asks again as soon
as it is answered. --soak SECONDS: a load of --soak-share of capacity (the median of the rounds), a quarter of it given
up at random times; memory, threads and open files of the server, printed each minute, must not grow, and no prompt may
be left in it. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import TEST_DATA
from http_load import Outcome, Target, arrivals, ask, figures, load

import ftk
from ftk.checkpoint import save_checkpoint
from ftk.generation.config import checked_config
from ftk.generation.engine.making import lasting_engine
from ftk.models import build_model, model_config
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.tokenizers import build_tokenizer
from ftk_cli.launch import free_port

ROWS = ("mean", "median", "p90", "p99")
MOST_GROWTH = 1.05, 20.0  # of the server's memory in a soak: a share, and MB
POOL = min(32, (os.cpu_count() or 1) + 4)  # threads that asyncio starts one after another, as work comes, and keeps


ALL: tuple[dict[str, Any], ...] = (
    {"arch": "glm_tiny", "requests": 100, "rounds": 3, "shares": [0.5, 0.8, 1.0], "peer": None},
    {"arch": "glm_base", "requests": 32, "rounds": 2, "shares": [0.5, 0.8], "peer": None},
    {"arch": "gpt2", "requests": 32, "rounds": 1},
)
"""What --all measures: options of each part; the last one needs --peer."""


def main() -> int:
    options = parse()
    torch.set_num_threads(options.threads)
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    parts = ALL[: None if options.peer else -1] if options.all else ({},)
    if options.quick:
        few = ("requests", "rounds", "shares")
        parts = tuple({name: value for name, value in part.items() if name not in few} for part in parts)
    found = [measured(argparse.Namespace(**{**vars(options), **part})) for part in parts]
    if options.json:
        Path(options.json).write_text(json.dumps(found if options.all else found[0], indent=1), encoding="utf-8")
    return 1 if any(one.get("soak", {}).get("problems") for one in found) else 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """One model: what is printed, as figures."""
    if options.quick:
        options.arch = options.arch.replace("base", "tiny")
    found: dict[str, Any] = {"backend": "ftk", "model_id": options.arch, "torch": torch.__version__}
    found |= {"threads": options.threads, "batch_size": options.batch_size, "seed": options.seed}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        write_model(options, folder)
        bodies = requests(options)
        with contextlib.ExitStack() as stack:
            process, target = stack.enter_context(ftk_server(folder, options, Path(place) / "log"))
            asyncio.run(load(target, bodies[: options.batch_size]))  # warms up
            if options.peer:
                their = stack.enter_context(peer_server(folder, options, Path(place) / "peer_log"))
                asyncio.run(load(their[1], bodies[:1]))
                found["clients"] = compared({"ftk": (process, target), "transformers": their}, bodies, options)
            else:
                found["saturation"] = saturation(folder, process.pid, target, bodies, options)
                if options.soak:
                    found["soak"] = asyncio.run(soak(target, process.pid, bodies, found["saturation"], options))
                else:
                    found["rates"] = rates(target, bodies, found["saturation"], options)
    print(flush=True)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--arch", default="glm_base", help="a GLM, or gpt2 (a Hugging Face folder)")
    add("--all", action="store_true", help="glm_tiny, glm_base and, with --peer, gpt2: all tables in one run")
    add("--quick", action="store_true", help="a small model and few requests")
    add("--requests", type=int, help="of each point; default: 200")
    add("--rounds", type=int, help="turns of each way; default: 3")
    add("--shares", type=float, nargs="*", default=[0.2, 0.5, 0.8, 1.0, 1.2], help="rates of arrival, of capacity")
    add(
        "--goodput", nargs="*", default=["ttft:500", "tpot:200"], metavar="MEASURE:MS", help="what a good request keeps"
    )
    add("--clients", type=int, nargs="+", default=[1, 8, 32], help="with --peer")
    add("--peer", metavar="PYTHON", help="the Python that has transformers[serving]")
    add("--soak", type=float, default=0.0, metavar="SECONDS")
    add("--soak-share", type=float, default=0.7, help="load of a soak, of capacity")
    add("--batch-size", type=int, default=16, help="rows of the service")
    add("--threads", type=int, default=1, help="of the server")
    add("--seed", type=int, default=0)
    add("--text", type=Path, default=TEST_DATA / "english" / "valid.txt", help="real lines")
    add("--vocab", type=Path, default=TEST_DATA / "tokenizers" / "bert-base-uncased-vocab.txt", help="of a GLM")
    add("--json", help="write the figures here")
    options = parser.parse_args()
    options.requests = options.requests or (12 if options.quick else 200)
    options.rounds = options.rounds or (1 if options.quick else 3)
    for path in (options.text, options.vocab):
        if not path.exists():
            parser.error(f"{path}: there is no such file; give --text and --vocab")
    try:
        options.goodput = {name: float(most) for name, _, most in (one.partition(":") for one in options.goodput)}
    except ValueError:
        parser.error("--goodput takes MEASURE:MS, e.g. ttft:500")
    if unknown := set(options.goodput) - {"ttft", "tpot", "e2el"}:
        parser.error(f"--goodput {unknown.pop()}: there are ttft, tpot, e2el")
    return options


def write_model(options: argparse.Namespace, folder: Path) -> None:
    """A model of random weights, with its tokenizer: a checkpoint, or Hugging Face's folder of a GPT-2."""
    torch.manual_seed(0)
    if not options.arch.startswith("gpt2"):
        tokenizer = build_tokenizer("bert_wordpiece", path=str(options.vocab), special_tokens="glm")
        tokenizer.save(folder / "tokenizer")
        shape = {"vocab_size": tokenizer.padded_vocab_size()}
        name, config = model_config(options.arch, **shape)
        tree = {"model": {"_name": name, **dataclasses.asdict(config)}, "task": {"_name": "glm_blank"}}
        model = build_model(options.arch, **shape)
        save_checkpoint(
            folder / "checkpoint_1", model=model, trainer_state={}, config=tree, tokenizer_folder=folder / "tokenizer"
        )
        return
    import tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel

    made = tokenizers.ByteLevelBPETokenizer()
    made.train([str(options.text)], vocab_size=8192, special_tokens=["<|endoftext|>"], show_progress=False)
    small = {"n_layer": 2, "n_embd": 64, "n_head": 4} if options.quick else {}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=made.get_vocab_size(), bos_token_id=0, eos_token_id=0, **small))
    with torch.no_grad():  # so that no answer ends early: the logit of this token is the lowest
        model.get_input_embeddings().weight[0].zero_()
    model.save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 1024}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def requests(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Bodies of requests: the prompt, 4 to 96 words, and the length of its answer, 16 to 64 tokens."""
    draw = random.Random(options.seed)
    words = options.text.read_text(encoding="utf-8").split()
    longest = 24 if options.quick else 64
    bodies = []
    for _ in range(options.requests):
        at, count = draw.randrange(max(1, len(words) - 96)), draw.randint(4, 96)
        bodies.append({"prompt": " ".join(words[at : at + count]), "max_tokens": draw.randint(longest // 4, longest)})
    return bodies


@contextlib.contextmanager
def running(command: Sequence[str], port: int, path: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server, once it answers `path` by 200."""
    with open(log, "wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            while status(port, path) != 200:
                if process.poll() is not None:
                    sys.exit(f"{command[0]} ended: {log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.1)
            yield process
        finally:
            process.terminate()


def status(port: int, path: str) -> int | None:
    """Of a GET; None where nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


@contextlib.contextmanager
def ftk_server(
    folder: Path, options: argparse.Namespace, log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Target]]:
    port = free_port()
    command = [sys.executable, "-m", "ftk_cli", "serve", "--path", str(folder), "--port", str(port), "--device", "cpu"]
    command += ["--max-len", "64", "--batch-size", str(options.batch_size), "--num-threads", str(options.threads)]
    command += ["--max-waiting", str(10**6)]
    with running(command, port, "/readyz", log) as process:
        yield process, Target(port, {"temperature": 0, "stream_options": {"include_usage": True}})


@contextlib.contextmanager
def peer_server(
    folder: Path, options: argparse.Namespace, log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Target]]:
    port = free_port()
    command = [options.peer, "-c", "from transformers.cli.transformers import main; main()", "serve", str(folder)]
    command += ["--port", str(port), "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1"]
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # ours has --num-threads
    with running(command, port, "/health", log) as process:
        yield process, Target(port, {"model": str(folder), "temperature": 0})


def asked_for(bodies: Sequence[dict[str, Any]], is_ftk: bool) -> list[dict[str, Any]]:
    """The bodies for a server: ftk is told that no answer may end early."""
    return [{**body, "min_tokens": body["max_tokens"]} if is_ftk else dict(body) for body in bodies]


def engine_rate(generator: Any, bodies: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Output tokens/s of the engine alone, by the clock and by processor time: requests as the service submits them."""
    prompts = []
    for body in bodies:
        request = generator.encode(body["prompt"], check=False).request
        lengths = checked_config(request.options, max_len=body["max_tokens"], min_len=body["max_tokens"])
        prompts.append(dataclasses.replace(request, options=lengths, stream=True))
    slots = 16 + max(generator.framing.slots(prompt) for prompt in prompts)
    engine = lasting_engine(generator.model, generator.framing, generator.config, slots)
    began, used, written = time.perf_counter(), time.process_time(), 0
    with evaluation_mode(generator.model):
        for prompt in prompts:
            engine.submit(prompt)
        while engine.is_busy:
            written += sum(len(event.tokens) for event in engine.step())
    return written / (time.perf_counter() - began), written / (time.process_time() - used)


def saturation(
    folder: Path, pid: int, target: Target, bodies: Sequence[dict[str, Any]], options: argparse.Namespace
) -> Any:
    """All requests at once: the service and its engine in turn."""
    generator = ftk.load_generator(folder, "cpu", max_len=64, batch_size=options.batch_size)
    engine_rate(generator, bodies[: options.batch_size])  # warms up
    engine, service = [], []
    for _ in range(options.rounds):
        engine.append(engine_rate(generator, bodies))
        used = processor_seconds(pid)
        service.append(figures(*asyncio.run(load(target, asked_for(bodies, True))), options.goodput))
        service[-1]["tokens_per_processor_second"] = service[-1]["total_output_tokens"] / (
            processor_seconds(pid) - used
        )
    check_complete(service)
    pairs = list(zip(service, engine, strict=True))
    share = statistics.median(one["output_throughput"] / rate for one, (rate, _) in pairs)
    of_processor = statistics.median(one["tokens_per_processor_second"] / rate for one, (_, rate) in pairs)
    fastest = max(rate for rate, _ in engine)
    best = max(service, key=lambda one: one["output_throughput"])
    best["median_request_throughput"] = statistics.median(one["request_throughput"] for one in service)
    best |= {"engine_throughput": fastest, "share_of_engine": share, "share_of_processor_time": of_processor}
    print(f"{options.arch}, {options.batch_size} rows, {options.threads} threads, {len(bodies)} requests at once")
    print(f"engine {fastest:.1f} tokens/s, service {best['output_throughput']:.1f} tokens/s, share {share:.1%}")
    print(f"tokens per second of processor time: share {of_processor:.1%}")
    return best


def processor_seconds(pid: int) -> float:
    """What a process has used."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def check_complete(found: Sequence[dict[str, Any]]) -> None:
    for one in found:
        if one["completed"] != one["num_prompts"]:
            sys.exit(f"{one['completed']} of {one['num_prompts']} requests were answered: {one['errors']}")


def rates(target: Target, bodies: Sequence[dict[str, Any]], whole: Any, options: argparse.Namespace) -> list[Any]:
    """Random arrivals at shares of the capacity; prints the table."""
    rows = []
    print(
        f"\n{'share':>6}{'req/s':>8}{'tok/s':>9}{'goodput':>9}{'shed':>6}{'':>8}{'ttft':>9}{'itl':>8}{'tpot':>8}{'e2el':>10}"
    )
    for share in options.shares:
        rate = share * whole["request_throughput"]
        outcomes, seconds = asyncio.run(load(target, asked_for(bodies, True), rate=rate, seed=options.seed))
        row = {"share": share, "request_rate": rate, **figures(outcomes, seconds, options.goodput)}
        rows.append(row)
        for number, name in enumerate(ROWS):
            front = f"{share:>6.2f}{rate:>8.2f}{row['output_throughput']:>9.1f}"
            front += f"{row.get('request_goodput', float('nan')):>9.2f}{row['shed'] + row['failed']:>6}"
            ttft, itl, tpot, e2el = (row[f"{name}_{measure}_ms"] for measure in ("ttft", "itl", "tpot", "e2el"))
            print(f"{front if number == 0 else '':<38}{name:>8}{ttft:>9.1f}{itl:>8.1f}{tpot:>8.1f}{e2el:>10.1f}")
    print(
        "times in ms; goodput in req/s: " + ", ".join(f"{name} <= {most:g}" for name, most in options.goodput.items())
    )
    return rows


def compared(
    servers: dict[str, tuple[subprocess.Popen[bytes], Target]],
    bodies: Sequence[dict[str, Any]],
    options: argparse.Namespace,
) -> list[Any]:
    """Clients that ask again as soon as they are answered, of both servers in turn; prints the table."""
    rows = []
    print(f"{options.arch}, fp32, {options.threads} threads; s: by processor time of the servers")
    print(
        f"{'clients':>8}{'':>14}{'tok/s':>9}{'ttft p50':>10}{'p99':>9}{'itl p50':>9}{'p99':>9}  ratio of tok/s and /s"
    )
    for clients in options.clients:
        found: dict[str, list[Any]] = {name: [] for name in servers}
        own = bodies[: max(4, min(len(bodies), 2 * clients))]
        for _ in range(options.rounds):
            for name, (process, target) in servers.items():
                used = processor_seconds(process.pid)
                answered = load(target, asked_for(own, name == "ftk"), clients=clients)
                found[name].append(one := figures(*asyncio.run(answered), options.goodput))
                used = processor_seconds(process.pid) - used
                one["tokens_per_processor_second"] = one["total_output_tokens"] / used
        for several in found.values():
            check_complete(several)
        ratio, of_processor = (
            statistics.median(ours[key] / theirs[key] for ours, theirs in zip(*found.values(), strict=True))
            for key in ("output_throughput", "tokens_per_processor_second")
        )
        row: dict[str, Any] = {"clients": clients, "ratio": ratio, "ratio_of_processor_time": of_processor}
        for name, several in found.items():
            row[name] = best = max(several, key=lambda one: one["output_throughput"])
            times = [best[f"{part}_{measure}_ms"] for measure in ("ttft", "itl") for part in ("median", "p99")]
            print(f"{clients:>8}{name:>14}{best['output_throughput']:>9.1f}", end="")
            print(f"{times[0]:>10.1f}{times[1]:>9.1f}{times[2]:>9.1f}{times[3]:>9.1f}", end="")
            print(f"{ratio:>9.2f}{of_processor:>9.2f}" if name == "ftk" else "")
        rows.append(row)
    return rows


async def soak(
    target: Target, pid: int, bodies: Sequence[dict[str, Any]], whole: Any, options: argparse.Namespace
) -> Any:
    """A load with clients that leave at random times; what the server holds must not grow."""
    draw = random.Random(options.seed)
    endless = itertools.cycle(asked_for(bodies, True))
    rate, usual = options.soak_share * whole["median_request_throughput"], whole["mean_e2el_ms"] / 1e3
    every = min(60.0, options.soak / 20)
    running: set[asyncio.Task[Outcome]] = set()
    counts: dict[str, int] = {}
    samples: list[dict[str, float]] = []
    print(f"\n{rate:.2f} requests/s for {options.soak:.0f} s")
    print(f"{'seconds':>8}{'RSS MB':>9}{'threads':>9}{'files':>7}  requests so far")

    def count(task: asyncio.Task[Outcome]) -> None:
        running.discard(task)
        counts[task.result().status] = counts.get(task.result().status, 0) + 1

    def sample() -> None:
        samples.append({"seconds": time.monotonic() - began, **held(pid)})
        one = samples[-1]
        said = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
        print(
            f"{one['seconds']:>8.0f}{one['rss_mb']:>9.1f}{one['threads']:>9.0f}{one['files']:>7.0f}  {said}", flush=True
        )

    began = time.monotonic()
    for pause in arrivals(rate, options.seed):
        await asyncio.sleep(pause)
        now = time.monotonic() - began
        if now > options.soak:
            break
        leaves = draw.uniform(0.0, usual) if draw.random() < 0.25 else None
        task = asyncio.ensure_future(ask(target, next(endless), leaves))
        running.add(task)
        task.add_done_callback(count)
        if now >= len(samples) * every:
            sample()
    await asyncio.gather(*running)
    deadline = time.monotonic() + 30
    while (left := await asyncio.to_thread(num_left, target.port)) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.2)  # the last connections close
    sample()
    problems = problems_of(samples, counts, left)
    print("\n".join(problems) or "nothing has grown, nothing is left")
    return {"samples": samples, "counts": counts, "problems": problems}


def problems_of(samples: Sequence[dict[str, float]], counts: dict[str, int], left: float) -> list[str]:
    """What a soak has found wrong: the last sample, without requests, against the one at a quarter of the time."""
    early, last = samples[len(samples) // 4], samples[-1]
    share, megabytes = MOST_GROWTH
    found = []
    lasted = last["seconds"] - early["seconds"]  # a service still fills its caches in its first seconds
    if lasted >= 30 and last["rss_mb"] > early["rss_mb"] * share + megabytes:
        found.append(f"memory has grown from {early['rss_mb']:.1f} to {last['rss_mb']:.1f} MB")
    found += [
        f"{name} have grown: {early[name]:.0f} -> {last[name]:.0f}"
        for name, more in (("threads", POOL), ("files", 0))
        if last[name] > early[name] + more
    ]
    if counts.get("failed") or counts.get("shed"):
        found.append(f"{counts.get('failed', 0)} requests failed, {counts.get('shed', 0)} were refused")
    if not counts.get("completed"):
        found.append("no request was answered")
    return [*found, *([f"{left:.0f} prompts are left in the service"] if left else [])]


def held(pid: int) -> dict[str, float]:
    """Memory, threads and open files of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return {"rss_mb": int(lines["VmRSS"].split()[0]) / 1024, "threads": int(lines["Threads"]), "files": files}


def num_left(port: int) -> float:
    """Prompts that run or wait, by the server's own count."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return sum(float(one) for one in re.findall(r"^ftk_requests_(?:running|waiting) (\S+)$", text, re.MULTILINE))


if __name__ == "__main__":
    raise SystemExit(main())
