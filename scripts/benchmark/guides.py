"""Steps of glm_tiny whose answers are held to a guide, beside steps without one, in turn.

    python scripts/benchmark/guides.py
    python scripts/benchmark/guides.py --guides 'regex:[0-9]+' --rows 4

Prompts and random weights as in serve.py; every answer has --tokens tokens. A figure is the median over the rounds of
the quotient of a round: of processor time, which other programs disturb less, and of time by the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import TEST_DATA
from serve import requests, write_model

import ftk
from ftk.generation.engine.making import lasting_engine
from ftk.modules.evaluation_mode import evaluation_mode

LONG_STRING = json.dumps({"type": "string", "minLength": 900})
GUIDES = ("regex:[a-z ]+", f"json:{LONG_STRING}", "regex:[a-z ]{900}", r"regex:(\w+ ){200}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guides", nargs="+", default=list(GUIDES))
    parser.add_argument("--rows", type=int, default=16, help="answers side by side")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--text", type=Path, default=TEST_DATA / "english" / "valid.txt", help="real lines")
    parser.add_argument("--vocab", type=Path, default=TEST_DATA / "tokenizers" / "bert-base-uncased-vocab.txt")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shared = argparse.Namespace(**vars(options), arch="glm_tiny", requests=options.rows, seed=0, quick=False)
    with tempfile.TemporaryDirectory() as place:
        write_model(shared, Path(place) / "run")
        prompts = [body["prompt"] for body in requests(shared)]
        ways = {guide: Way(Path(place) / "run", guide, prompts, options) for guide in ("", *options.guides)}
        for way in ways.values():  # warms up
            way.run()
        rounds = [{guide: way.run() for guide, way in ways.items()} for _ in range(options.rounds)]
    for guide in options.guides:
        quotients = zip(*([a / b for a, b in zip(one[guide], one[""], strict=True)] for one in rounds), strict=True)
        processor, clock = map(statistics.median, quotients)
        print(f"{guide:60.60}  processor time x {processor:.2f}  clock x {clock:.2f}")


class Way:
    """An engine and its requests."""

    def __init__(self, folder: Path, guide: str, prompts: list[str], options: Any) -> None:
        own = {"guide": guide} if guide else {}
        lengths = {"max_len": options.tokens, "min_len": options.tokens}
        self.generator = ftk.load_generator(folder, "cpu", batch_size=options.rows, **lengths, **own)
        made = self.generator
        self.requests = [made.encode(prompt, check=False).request for prompt in prompts]
        slots = 16 + max(made.framing.slots(one) for one in self.requests)
        self.engine = lasting_engine(made.model, made.framing, made.config, slots)

    def run(self) -> tuple[float, float]:
        """Seconds of all steps but the one that reads the prompts: of the processor, and by the clock."""
        with evaluation_mode(self.generator.model):
            for request in self.requests:
                self.engine.submit(request)
            self.engine.step()
            started = time.process_time(), time.perf_counter()
            while self.engine.is_busy:
                self.engine.step()
            return time.process_time() - started[0], time.perf_counter() - started[1]


if __name__ == "__main__":
    main()
