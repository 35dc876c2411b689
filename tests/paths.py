"""Where tests find what they read; one place, so that a test that moves goes on finding it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEST_DATA = Path(os.environ.get("FTK_TEST_DATA", ROOT.parent / "shared")) / "data"
"""Real text, vocabularies and hostile inputs, which are not in the repository."""
