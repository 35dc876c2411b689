"""Prompts of any number are read, answered, written and forgotten block by block."""

from __future__ import annotations

import gc
import io
import sys
import weakref
from types import SimpleNamespace

import pytest

from ftk.generation.results import EncodedText, TextResult
from ftk_cli import generate
from ftk_cli.inference_options import Checkpoints
from ftk_cli.progress import BATCHES_AT_ONCE

LINE = b"the [MASK] fox\n"
NUM_LINES = 20_000
BATCH_SIZE = 8
BLOCK = BATCHES_AT_ONCE * BATCH_SIZE


class Endless(io.RawIOBase):
    """A pipe that gives line after line, and knows how many it has given."""

    def __init__(self):
        self.given = 0

    def readable(self):
        return True

    def readinto(self, buffer):
        lines = LINE * min(len(buffer) // len(LINE), NUM_LINES - self.given)
        self.given += len(lines) // len(LINE)
        buffer[: len(lines)] = lines
        return len(lines)


class Counting:
    """Stands for a generator; counts what it gets, and what somebody holds of it later."""

    example = "the [MASK] fox"

    def __init__(self, pipe):
        self.pipe = pipe
        self.tokenizer = SimpleNamespace()
        self.prompts, self.results = [], []  # weak
        self.answered = self.most_held = self.most_ahead = 0

    def encode(self, prompt, options):
        encoded = EncodedText(prompt, None)
        self.prompts.append(weakref.ref(encoded))
        return encoded

    def generate_encoded(self, prompts, progress):
        self.most_ahead = max(self.most_ahead, self.pipe.given - self.answered)
        self.answered += len(prompts)
        results = [TextResult(prompt.prompt, "the red fox", []) for prompt in prompts]
        self.results += map(weakref.ref, results)
        for kind in (self.prompts, self.results):
            kind[:] = [one for one in kind if one() is not None]
            self.most_held = max(self.most_held, len(kind))
        progress(len(prompts))
        return results


@pytest.mark.parametrize("to_file", [False, True])
def test_no_more_than_two_blocks_of_prompts_are_held_whatever_the_length_of_the_input(monkeypatch, tmp_path, to_file):
    pipe = Endless()
    filler = Counting(pipe)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(pipe, 1024)))
    monkeypatch.setattr(generate, "open_generator", lambda *options: filler)
    monkeypatch.setattr(generate, "with_options_of_task", lambda root, argv: root)
    monkeypatch.setattr(generate, "find_checkpoints", lambda *options: Checkpoints([]))
    monkeypatch.setattr(generate, "say_proposals", lambda *options: None)  # reads the checkpoint
    arguments = ["--path", "none", "--input", "-", "--batch-size", str(BATCH_SIZE), "--output-format", "json"]
    gc.disable()  # nothing may wait for the collector of cycles
    try:
        assert generate.main([*arguments, *(["--results-path", str(tmp_path / "results")] if to_file else [])]) == 0
    finally:
        gc.enable()
    assert filler.answered == NUM_LINES
    assert filler.most_held <= 2 * BLOCK  # one that is written, one that is answered
    assert filler.most_ahead <= BLOCK + 1024 // len(LINE) + 1
    if to_file:
        assert (tmp_path / "results").read_bytes().count(b"\n") == NUM_LINES
