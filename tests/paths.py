"""Where tests find what they read; one place, so that a test that moves goes on finding it."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEST_DATA = Path(os.environ.get("FTK_TEST_DATA", ROOT.parent / "shared")) / "data"
"""Real text, vocabularies and hostile inputs, which are not in the repository."""


def corpus_lines() -> list[str]:
    """Some 4,000 lines of English; a fixed file, so that no edit of the docs changes a loss."""
    with gzip.open(ROOT / "tests" / "corpus.txt.gz", "rt", encoding="utf-8") as file:
        return file.read().splitlines()
