"""What the tests of ftk-preprocess share: made sentences, the command in this process, a folder as bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ftk_cli.preprocess import main

WORDS = [
    *("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "bird", "fly", "over", "two", "trees"),
    *("near", "that", "old", "house", "by", "seven", "hills"),
]


def sentences(count: int, seed: int = 0, lengths: tuple[int, int] = (3, 15), end: str = " .") -> list[str]:
    """Random sentences; the number of words is at least the first bound and below the second."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, size=random.integers(*lengths))) + end for _ in range(count)]


def run(*arguments: object) -> int:
    """The exit code of ftk-preprocess."""
    return main([str(argument) for argument in arguments])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
