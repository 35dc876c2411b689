"""Prefix caching: what an engine takes over from what it has read, against reading each text whole.

    python scripts/benchmark/prefix_caching.py --arch gpt2
    python scripts/benchmark/prefix_caching.py --quick

A conversation: each turn's prompt is all that was said before and --turn-tokens new tokens; the time to its first token
is that of the last turn. Examples: --prompts prompts, four at once, each of the same --example-tokens tokens with 40 of
its own behind, answered with 8 tokens. Choices: the same prompts, each with four candidates of three tokens that are
scored. Both ways take turns, --rounds times, on the same random weights; the best round counts. Answers must be the
same.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ftk.generation.config import GenerationConfig
from ftk.generation.engine import prefix_cache, scoring
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.making import engine_for, lasting_engine
from ftk.generation.engine.request import Request
from ftk.models import build_model

ANSWER = GenerationConfig(max_len=32, min_len=32, batch_size=4)
SHORT = GenerationConfig(max_len=8, min_len=8)
WAYS = {"whole": math.inf, "taken over": prefix_cache.MIN_SHARED_TOKENS}


def main() -> int:
    options = parse()
    torch.manual_seed(0)
    model: Any = build_model(options.arch).eval().to(options.device)
    size, limit = model.config.vocab_size, model.config.max_positions
    random = np.random.default_rng(0)
    turns = random.integers(2, size, (options.turns, options.turn_tokens)).tolist()
    common = random.integers(2, size, options.example_tokens).tolist()
    prompts = [[*common, *own] for own in random.integers(2, size, (options.prompts, 40)).tolist()]
    framing = Continuation([1], limit)
    seconds: dict[tuple[str, str], list[float]] = {}
    answers: dict[str, list[int]] = {}
    for _ in range(options.rounds):
        for way, least in WAYS.items():
            with taking_over(least):
                found_here = {
                    "first token of the last turn": conversation(model, framing, turns),
                    "all examples": examples(model, framing, prompts),
                    "all choices": choices(model, framing, prompts),
                }
                for name, found in found_here.items():
                    seconds.setdefault((name, way), []).append(found[0])
                    assert answers.setdefault(name, found[1]) == found[1], f"{name}: other answers"
    best = {key: min(own) for key, own in seconds.items()}
    print(f"{options.arch}, {sum(one.numel() for one in model.parameters()) / 1e6:.0f} M parameters, seconds")
    for name in answers:
        whole, taken = (best[name, way] for way in WAYS)
        print(f"{name:<30}{whole:>9.3f} whole{taken:>9.3f} taken over{whole / taken:>7.2f} times as fast")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({f"{name}, {way}": value for (name, way), value in best.items()}, file)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--arch", default="gpt2", help="a causal architecture, with random weights")
    add("--device", default="cpu")
    add("--turns", type=int, default=6)
    add("--turn-tokens", type=int, default=100)
    add("--example-tokens", type=int, default=700)
    add("--prompts", type=int, default=32)
    add("--rounds", type=int, default=3)
    add("--quick", action="store_true", help="gpt2_tiny, seconds")
    add("--json", metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.arch, options.turns, options.turn_tokens = "gpt2_tiny", 2, 40
        options.example_tokens, options.prompts, options.rounds = 60, 6, 1
    return options


@contextmanager
def taking_over(least: float) -> Iterator[None]:
    """Beginnings count from this many tokens on."""
    usual = prefix_cache.MIN_SHARED_TOKENS
    prefix_cache.MIN_SHARED_TOKENS = scoring.MIN_SHARED_TOKENS = least  # type: ignore[assignment]
    try:
        yield
    finally:
        prefix_cache.MIN_SHARED_TOKENS = scoring.MIN_SHARED_TOKENS = usual


def conversation(model: torch.nn.Module, framing: Continuation, turns: list[list[int]]) -> tuple[float, list[int]]:
    """Seconds from the last prompt to its first token, and all that was said."""
    room = sum(map(len, turns)) + len(turns) * ANSWER.max_len
    engine, first = lasting_engine(model, framing, ANSWER, room), 0.0
    said: list[int] = []
    for turn in turns:
        said += turn
        engine.submit(Request([*said], ANSWER, stream=True))
        began, first = time.perf_counter(), 0.0
        while engine.is_busy:
            for event in engine.step():
                first = first or time.perf_counter() - began
                said += [] if event.answer is None else event.answer.tokens
    return first, said


def examples(model: torch.nn.Module, framing: Continuation, prompts: list[list[int]]) -> tuple[float, list[int]]:
    """Seconds for all prompts, and their answers."""
    requests = [Request(prompt, SHORT) for prompt in prompts]
    engine, began = engine_for(model, framing, requests, ANSWER.batch_size), time.perf_counter()
    answers = engine.answers(requests)
    return time.perf_counter() - began, [token for (answer,) in answers for token in answer.tokens]


def choices(model: torch.nn.Module, framing: Continuation, prompts: list[list[int]]) -> tuple[float, list[int]]:
    """Seconds to score four candidates of each prompt, and the best ones."""
    candidates = [[[first, 7, 8] for first in range(2, 6)] for _ in prompts]
    began = time.perf_counter()
    found = scoring.score(model, framing, [Request(prompt, SHORT) for prompt in prompts], candidates)
    seconds = time.perf_counter() - began
    return seconds, [max(range(4), key=lambda place: sum(own[place].logprobs)) for own in found]


if __name__ == "__main__":
    raise SystemExit(main())
