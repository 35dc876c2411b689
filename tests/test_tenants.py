"""The toolkit does not know its tenants: files outside GLM's own folders name GLM or a blank less and less."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN = ("ftk/models/glm/", "ftk/models/glm4/", "ftk/models/glm130b/", "ftk/tasks/glm_blank/", "ftk/builtins.py")
WORDS = re.compile(
    r"(?<![a-z])(glm|blanks?(?![a-z]|[ _-]lines?)|[se]op(?![a-z]))|block_position|(?<!si)gmask|smask", re.IGNORECASE
)
"""In texts and in identifiers, whose parts are words, too: `no_blank`, `NoBlank`."""
STILL = Path(__file__).with_name("tenants.json")
"""Files that name GLM or a blank today, and in how many lines. Entries go down, then away; none is added."""


def found() -> dict[str, int]:
    """Lines that name GLM or a blank, by file."""
    files = [*(ROOT / "ftk").rglob("*.py"), *(ROOT / "ftk").rglob("*.py[xd]"), *(ROOT / "ftk_cli").rglob("*.py")]
    names = {file.relative_to(ROOT).as_posix(): file for file in files}
    lines = {name: names[name].read_text(encoding="utf-8").splitlines() for name in names if not name.startswith(OWN)}
    counts = {name: sum(bool(WORDS.search(_apart(line))) for line in lines[name]) for name in lines}
    return {name: counts[name] for name in sorted(counts) if counts[name]}


def _apart(line: str) -> str:
    """A line in which capitals that begin a word within an identifier stand behind "_"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", line)


def test_no_further_line_outside_of_its_folders_names_glm_or_a_blank():
    still = json.loads(STILL.read_text(encoding="utf-8"))
    more = {name: (count, still.get(name, 0)) for name, count in found().items() if count > still.get(name, 0)}
    assert not more, f"file: (lines now, lines allowed); put them into GLM's folders: {more}"


def test_the_list_of_what_still_does_is_kept_short():
    now = found()
    less = {
        n: (now.get(n, 0), allowed) for n, allowed in json.loads(STILL.read_text()).items() if now.get(n, 0) < allowed
    }
    assert not less, f"lower these entries of {STILL.name} (lines now, lines allowed): {less}"
