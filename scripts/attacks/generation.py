"""Generation: hostile prompts and prompts' options, results' files, terminals, long input, weights that are no numbers.

Numbers of the attack's table (issue 12): 10 weights that are not finite, 13 terminals, 14 and 20 files and long input.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pty
import random
import re
import struct
import unicodedata
from collections.abc import Callable
from pathlib import Path

from attacks.folders import generate, go_on, renew_manifest
from attacks.harness import PROMPT, Outcome, Place, case
from attacks.mutations import HOSTILE, TREES, damages
from attacks.options import add_options

SEARCHES = {
    "greedy": ["--beam=1"],
    "beam": ["--beam=3", "--nbest=2"],
    "sampling": ["--sampling", "--top-k=5"],
}
ESCAPES = "\x1b[2J\x1b]0;owned\x07 \x9b31m \u202e\u2066 \x08\x7f"
PROMPTS: list[bytes] = [
    b"",
    b" \t ",
    b"no blank at all",
    b"[MASK]" * 3,
    b"[gMASK] [MASK] [sMASK]",
    b"[gMASK] behind it [gMASK]",
    b"[mask] <mask> [MASK",
    b"NUL \0 in it [MASK]",
    b"\xff\xfe no Unicode [MASK]",
    b"half a character \xed\xa0\x80 [MASK]",
    "\ufeff\u2028[MASK]\u2029\x85".encode(),
    f"{ESCAPES} [MASK]".encode(),
    "e\u0301\u0301\u0301 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u05d0\u05d1 [MASK] .".encode(),
    b"<|endofpiece|> [CLS] <eop> <sop> [MASK]",
    b"\r[MASK]\r",
    b"word " * 500 + b"[MASK]",
    b"x" * (1 << 20) + b"[MASK]",
    PROMPT.encode(),
]
WORDS = [f"word{number}" for number in range(30_000)]
LONG = {
    "constraints of 30,000 words": {"constraints": [" ".join(WORDS)]},
    "30,000 constraints": {"constraints": WORDS},
    "a prefix of 30,000 words": {"prefix": [" ".join(WORDS)]},
    "a stop string of 30,000 words": {"stop": [" ".join(WORDS)]},
    "30,000 stop strings": {"stop": WORDS},
    "30,000 forbidden words": {"forbid_words": WORDS},
    "a forbidden phrase of 30,000 words": {"forbid_words": [" ".join(WORDS)]},
    "a forbidden letter 100,000 times": {"forbid_words": ["a " * 100_000]},
}
LONG_PROMPTS = {
    "1,000,000 characters": "x" * 1_000_000 + " [MASK]",
    "250,000 words": "the " * 250_000 + "[MASK]",
    "10,000 blanks": "[MASK] " * 10_000,
    "100,000 brackets": "[" * 100_000 + "[MASK]",
}


def add_cases(chance: random.Random) -> None:
    from ftk.config import section
    from ftk.generation.processors.steering import PROMPT_OPTIONS
    from ftk.tasks.glm_blank.infill.config import FillConfig
    from ftk_cli.generate_options import GenerateRoot

    for search in SEARCHES:
        _prompts(search)
        for option in PROMPT_OPTIONS if search in ("beam", "sampling") else ():
            _values(search, option)
    for name, options in LONG.items():
        _long(name, json.dumps({"prompt": PROMPT, **options}))
    for name, prompt in LONG_PROMPTS.items():
        _long(name, json.dumps({"prompt": prompt}))
    for name, content in TREES.items():
        _settings(name, lambda path, content=content: path.write_bytes(content))
    for name, harm in damages(chance).items():
        if name not in ("a flipped bit", "deep lists"):  # one changes a value at most, the other is among the trees
            _settings(name, harm)
    for value in (math.nan, math.inf, -math.inf):
        _not_finite(value)

    def command(place: Place, chosen: list[str], given: list[str], positional: bool) -> list[str]:
        path = ["--path", str(place.workspace / "run")]
        data = given if positional else [*given, "--input", str(place.prompts)]
        return ["ftk-generate", *path, *data, "--device=cpu"]

    own = ("generation", FillConfig, section("how to search"))
    root = dataclasses.make_dataclass("Root", [own], bases=(GenerateRoot,), kw_only=True)
    add_options("generation/", root, command, chance, numbers_only=True)


def _ask(place: Place, *arguments: str, command: str = "ftk-generate") -> list[str]:
    form = ["--output-format=fairseq"] if command == "ftk-generate" else []  # which numbers the prompts
    return [command, "--path", str(place.workspace / "run"), "--max-len=4", "--device=cpu", *form, *arguments]


def _answers_all(count: int) -> Callable[[Place, Outcome], str | None]:
    """A check that each line is answered (F-) or named (E-), under its number."""

    def check(place: Place, outcome: Outcome) -> str | None:
        found = {int(number) for number in re.findall(r"(?m)^[FE]-(\d+)\t", outcome.stdout)}
        missing = sorted(set(range(count)) - found)
        return f"neither answers nor names the lines {missing[:5]}" if missing else None

    return check


def _prompts(search: str) -> None:
    @case(f"generation/hostile prompts by {search}", codes=(1,), check=_answers_all(len(PROMPTS)), lines=50)
    def _(place: Place) -> list[str]:
        path = place.folder / "hostile.txt"
        path.write_bytes(b"\n".join(PROMPTS) + b"\n")
        return _ask(place, "--input", str(path), *SEARCHES[search])


def _values(search: str, option: str) -> None:
    values = [*HOSTILE, -0.5, 2, "2", [1.5], ["x", None], ["\x1b[2J"], [["x"]], "the", ["the", "of"], {"x": [1]}]

    name = f"generation/prompts with hostile {option} by {search}"

    @case(name, codes=(0, 1), check=_answers_all(len(values)), lines=50)
    def _(place: Place) -> list[str]:
        lines = [json.dumps({"prompt": PROMPT, option: value}) for value in values]
        path = place.folder / "hostile.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return _ask(place, "--input", str(path), *SEARCHES[search])


def _long(name: str, line: str) -> None:
    @case(f"generation/20 {name}", codes=(0, 1), check=_answers_all(2), seconds=30)
    def _(place: Place) -> list[str]:
        path = place.folder / "long.jsonl"
        path.write_text(f"{line}\n{json.dumps({'prompt': PROMPT})}\n")
        return _ask(place, "--input", str(path))


@case("generation/20 --input is a device without lines", says="no line end|is a device", seconds=30)
def _(place: Place) -> list[str]:
    return _ask(place, "--input=/dev/zero")


@case("generation/20 --forbid-words-file is a device", says="/dev/zero", seconds=30)
def _(place: Place) -> list[str]:
    return _ask(place, "--input", str(place.prompts), "--forbid-words-file=/dev/zero")


_INPUT = ("--output-format=json", "--input")

for _name in ("/dev/null", "/proc/self/mem", "/nothing\0", "~no-such-user/x"):

    @case(f"generation/20 --results-path={_name}")
    def _(place: Place, path: str = _name) -> list[str]:
        return _ask(place, *_INPUT, str(place.prompts), f"--results-path={path}")


def _settings(name: str, harm: Callable[[Path], object]) -> None:
    @case(f"generation/14 settings of results: {name}")
    def _(place: Place) -> list[str]:
        (place.folder / "results").write_text('{"id": 0, "source": "x", "answers": []}\n')
        settings = place.folder / "results.settings.json"
        settings.write_text("{}")
        harm(settings)
        return _ask(place, *_INPUT, str(place.prompts), "--results-path", str(place.folder / "results"))


def _not_finite(value: float) -> None:
    def prepare(place: Place) -> str:
        for file in (place.run / "checkpoint_2" / "model").glob("*.safetensors"):
            content = file.read_bytes()
            file.write_bytes(content[:-400] + struct.pack("<f", value) * 100)
        renew_manifest(place.run / "checkpoint_2")
        return str(place.run / "checkpoint_2")

    @case(f"generation/10 weights that are {value}: generate", codes=(0, 1, 2))
    def _(place: Place) -> list[str]:
        prepare(place)
        return generate(place)

    @case(f"generation/10 weights that are {value}: export", codes=(0, 1, 2), says="finite|NaN")
    def _(place: Place) -> list[str]:
        out = str(place.folder / "out.safetensors")
        return ["ftk-checkpoint", "export", prepare(place), out, "--format=safetensors"]

    @case(f"generation/10 weights that are {value}: the run goes on", codes=(0, 1, 2), says="finite|NaN")
    def _(place: Place) -> list[str]:
        prepare(place)
        return go_on(place)


def _on_a_terminal(place: Place) -> None:
    """Standard output becomes a terminal; what reaches it is in the file `terminal`."""
    reader, terminal = pty.openpty()
    if os.fork() == 0:
        os.close(terminal)
        with open(place.folder / "terminal", "wb") as file:
            while part := _read(reader):
                file.write(part)
                file.flush()
        os._exit(0)
    os.close(reader)
    os.dup2(terminal, 1)
    os.close(terminal)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # nobody has the terminal any longer
        return b""


def _shows_no_controls(place: Place, outcome: Outcome) -> str | None:
    shown = (place.folder / "terminal").read_text(encoding="utf-8", errors="replace")
    if "x1b" not in shown:
        return "does not show the prompt"
    raw = {character for character in shown if unicodedata.category(character) in ("Cc", "Cf")} - set("\t\n\r")
    return f"sends {sorted(raw)} to the terminal" if raw else None


for _command, _arguments in {
    "ftk-generate": ["--color=never", "--print-step", "--alternatives=2", "--nbest=2", "--beam=2"],
    "ftk-interactive": ["--color=never"],
}.items():

    @case(
        f"generation/13 control characters in a prompt of {_command} on a terminal",
        codes=(0, 1),
        check=_shows_no_controls,
    )
    def _(place: Place, command: str = _command, arguments: list[str] = _arguments) -> list[str]:
        place.prompts.write_text(f"{ESCAPES} [MASK]\nno blank {ESCAPES}\n", encoding="utf-8")
        os.dup2(os.open(place.prompts, os.O_RDONLY), 0)
        _on_a_terminal(place)
        return _ask(place, *arguments, *(["--input=-"] if command == "ftk-generate" else []), command=command)


for _name, _words in {
    "--path": ["--path", f"/{ESCAPES}", "--input=-"],
    "--input": ["--input", f"/{ESCAPES}"],
    "DATA": [f"/{ESCAPES}", "--gen-subset=valid"],
    "--search": ["--input=-", f"--search={ESCAPES}"],
    "--results-path": ["--input=-", "--output-format=json", f"--results-path=/etc/passwd/{ESCAPES}"],
}.items():

    @case(f"generation/13 control characters in {_name}", says=r"\\x1b")
    def _(place: Place, words: list[str] = _words) -> list[str]:
        return _ask(place, *words)
