"""What docs/glm.md says the code prints is what it prints."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_sample_in_the_document_is_the_real_one():
    text = (ROOT / "docs" / "glm.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```$.*?\n\n((?:    [^\n]*\n)+)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    done = subprocess.run([sys.executable, "-c", found.group(1)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == textwrap.dedent(found.group(2))
