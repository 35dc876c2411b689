"""ftk-preprocess: bombs, texts that change while they are read, links in the place of its own names.

Numbers of the attack's table (issue 12): 2 changing texts, 4 links, 16 endless lines; 19 options.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attacks.harness import Outcome, Place, case
from attacks.options import add_options

MODES = ("raise", "skip")


def add_cases(chance: random.Random) -> None:
    from ftk_cli.preprocess import PreprocessConfig

    for suffix, compress in {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.items():
        for mode in MODES:
            _bomb(suffix, compress, mode)
    for name, (change, codes, says) in CHANGES.items():
        for suffix in ("", ".gz"):
            for workers in (1, 2):
                _changing(name, change, codes, says, suffix, workers)

    def command(place: Place, chosen: list[str], given: list[str], positional: bool) -> list[str]:
        return preprocess(place, place.prompts, *chosen, *given)

    add_options("texts/", PreprocessConfig, command, chance)


def preprocess(place: Place, source: Path | str, *arguments: str) -> list[str]:
    model = next((place.workspace / "data-bin" / "tokenizer").glob("*.model"))
    out = str(place.folder / "out")
    return ["ftk-preprocess", f"--trainpref={source}", f"--destdir={out}", f"--tokenizer-path={model}", *arguments]


def whole_or_absent(place: Place, outcome: Outcome) -> str | None:
    """A folder that verifies, or nothing."""
    from ftk.data.inspect_data import verify

    found = sorted(path.name for path in place.folder.glob("out*"))
    if outcome.code:
        return f"leaves {found}" if found else None
    return "; ".join(verify(place.folder / "out")) or (f"leaves {found}" if found != ["out"] else None)


def _bomb(suffix: str, compress: Callable[[bytes], bytes], mode: str) -> None:
    codes, says = ((2,), r"bomb[^:]*:2: ") if mode == "raise" else ((0,), "")

    @case(f"texts/16 a line of 300 MB in {suffix}: {mode}", codes=codes, says=says, check=whole_or_absent)
    def _(place: Place) -> list[str]:
        bomb = place.folder / f"bomb{suffix}"
        bomb.write_bytes(compress(b"a line\n") + compress(b"a" * 10_000_000) * 30 + compress(b"\nanother line\n"))
        return preprocess(place, bomb, f"--on-error={mode}", "--workers=1")


for _number in (0, -1, 1, 6, 10**15, 10**16):

    @case(f"texts/16 --max-document-bytes={_number}", codes=(0, 2), check=whole_or_absent)
    def _(place: Place, number: int = _number) -> list[str]:
        place.prompts.write_text("a line\n" * 3 + "a longer line\n")
        return preprocess(place, place.prompts, f"--max-document-bytes={number}", "--on-error=skip", "--workers=1")


def _grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(gzip.compress(b"more\n") if path.suffix == ".gz" else b"more\n")


CHANGES: dict[str, tuple[Callable[[Path], None], tuple[int, ...], str]] = {
    "grows": (_grow, (0,), "grew from"),
    "is removed": (Path.unlink, (0, 1), ""),
}


def _changing(
    name: str, change: Callable[[Path], None], codes: tuple[int, ...], says: str, suffix: str, workers: int
) -> None:
    @case(f"texts/2 a text{suffix} {name}, {workers} workers", codes=codes, says=says, check=whole_or_absent)
    def _(place: Place) -> list[str]:
        module: Any = importlib.import_module("ftk.data.text.preprocess")  # ftk.data has a function of this name
        source = place.folder / f"text{suffix}"
        text = place.text.read_bytes() * 3
        source.write_bytes(gzip.compress(text, 1) if suffix else text)
        cut_file = module.cut_file

        def cut(path: str, kind: str, **options: Any) -> Iterator[Any]:
            for number, item in enumerate(cut_file(path, kind, **options)):
                if number == 0:
                    change(Path(path))
                yield item

        module.cut_file = cut
        return preprocess(place, source, f"--workers={workers}")


OUTPUTS: dict[str, Callable[[Place, Path], object]] = {
    "a link to a file": lambda place, out: out.symlink_to(place.victim),
    "a link to a folder of others": lambda place, out: out.symlink_to(place.folder),
    "a link to nothing": lambda place, out: out.symlink_to("/nothing/there"),
    "a link to itself": lambda place, out: out.symlink_to(out),
    "a pipe": lambda place, out: os.mkfifo(out),
    "a device": lambda place, out: out.symlink_to("/dev/null"),
    "a folder of others": lambda place, out: (
        (out / "x").mkdir(parents=True) or (out / "x" / "notes").write_text("mine")
    ),
}

for _name, _make in OUTPUTS.items():

    @case(f"texts/4 --destdir is {_name}", codes=(1, 2))
    def _(place: Place, make: Callable[[Place, Path], object] = _make) -> list[str]:
        make(place, place.folder / "out")
        return preprocess(place, place.prompts, "--overwrite", "--workers=1")


def _keeps_links(place: Place, outcome: Outcome) -> str | None:
    from ftk.data.inspect_data import verify

    missing = [name for name in ("notes", "victim") if not (place.folder / name).exists()]
    return f"removes {missing}, which only a link names" if missing else "; ".join(verify(place.folder / "out")) or None


@case("texts/4 links in the place of temporary names", codes=(0,), check=_keeps_links)
def _(place: Place) -> list[str]:
    (place.folder / "notes").mkdir()
    (place.folder / "out.tmp-a").symlink_to(place.folder / "notes")
    (place.folder / "out.tmp-b").symlink_to(place.victim)
    (place.folder / "out.lock").symlink_to(place.victim)
    (place.folder / f"out.tmp-{os.getpid()}").symlink_to(place.victim)
    return preprocess(place, place.prompts, "--workers=1")


@case("texts/4 a data folder with a link among its files is replaced", codes=(0, 2), check=_keeps_links)
def _(place: Place) -> list[str]:
    place.data.rename(place.folder / "out")
    (place.folder / "notes").mkdir()
    (place.folder / "out" / "train.bin").unlink()
    (place.folder / "out" / "train.bin").symlink_to(place.victim)
    return preprocess(place, place.prompts, "--overwrite", "--workers=1")


SOURCES = {
    "a folder": "/usr",
    "an endless device": "/dev/zero",
    "an empty device": "/dev/null",
    "memory": "/proc/self/mem",
    "a file without permission of reading": "/proc/self/environ-not-there",
    "a name with a comma": "a,b",
    "NUL": "a\0b",
    "many": ",".join(["/dev/null"] * 1000),
}

for _name, _source in SOURCES.items():

    @case(f"texts/--trainpref is {_name}", codes=(1, 2), check=whole_or_absent)
    def _(place: Place, source: str = _source) -> list[str]:
        return preprocess(place, source, "--workers=1")
