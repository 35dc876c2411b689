"""What docs/glm.md says the code prints is what it prints."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_sample_in_the_document_is_the_real_one():
    text = (ROOT / "docs" / "glm.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```$.*?\n\n((?:    [^\n]*\n)+)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(found.group(1), {})
    assert shown.getvalue() == textwrap.dedent(found.group(2))
