"""ftk-interactive: fills the blanks of texts as they are typed, or come through a pipe."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftk.config import compose, section
from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.config import ProcessorConfig
from ftk_cli.frame import run
from ftk_cli.inference_options import DeviceConfig, decode_line, open_filler

if TYPE_CHECKING:
    from ftk.generation import FillResult

PROG = "ftk-interactive"
DESCRIPTION = """Reads texts with [MASK], [sMASK] or [gMASK] and prints each with its blanks filled.
Example: ftk-interactive --path run --beam 4"""
LEAVE = ("exit", "quit")


@dataclass(kw_only=True)
class InteractiveConfig:
    path: str = field(
        metadata={"help": "checkpoint, or a run's folder (its best checkpoint, else its last)", "metavar": "PATH"}
    )


@dataclass(kw_only=True)
class InteractiveRoot:
    interactive: InteractiveConfig = section("model")
    generation: GenerationConfig = section("how to search")
    processors: ProcessorConfig = section("logits processors")
    common: DeviceConfig = section("common")


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, body, argv)


def body(argv: list[str]) -> int:
    root = compose(InteractiveRoot, PROG, DESCRIPTION, argv)
    filler = open_filler(root.interactive.path, root.common, root.generation, root.processors)
    typed = sys.stdin.isatty()
    if typed:
        print(
            f"Write a text with {', '.join(filler.blanks)} where something is missing, or one to go on; "
            f"answers have at most {root.generation.max_len} tokens (--max-len).\n"
            f"To leave: {', '.join(LEAVE)} or Ctrl-D."
        )
    failed = False
    for number, line in enumerate(_typed_lines() if typed else sys.stdin.buffer, start=1):
        if typed and not line.strip():
            continue
        try:
            text = line if isinstance(line, str) else decode_line(line)
            (result,) = filler.fill([text])
        except UserError as error:
            place = "" if typed else f"line {number}: "
            print(f"{PROG}: {place}{error}", file=sys.stderr, flush=True)
            failed = True
            continue
        if not typed:  # what came by a pipe has not been seen yet
            print("> " + text.rstrip("\r\n"))
        print("\n".join(_shown(result)), flush=True)
    return 2 if failed and not typed else 0


def _typed_lines() -> Iterator[str]:
    if importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")  # from now on input() has line editing and history
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if line.strip().lower() in LEAVE:
            return
        yield line


def _shown(result: FillResult) -> Iterator[str]:
    """The filled text, then each answer with its probability and those of its tokens."""
    yield result.text
    for number, answer in enumerate(result.answers, start=1):
        tokens = " ".join(f"{math.exp(one):.3f}" for one in answer.token_logprobs)
        yield f"  {number}. {answer.blank} = {answer.text!r}  p = {answer.probability:.3g}  (each: {tokens})"
    yield ""
