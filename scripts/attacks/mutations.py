"""What files are made of that should not be believed: hostile values and files, and mutations of good ones."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**50, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308),
    *(
        float("nan"),
        float("inf"),
        "",
        "x",
        "nan",
        "../../etc/passwd",
        "/dev/zero",
        "\x1b[2J",
        "\ud800".encode("utf-8", "replace").decode(),
    ),
    *([], [[]], {}, {"": None}, [0] * 1000, ["x"], [-1], [2**50, 2], "9" * 5000),
)

TREES: dict[str, bytes] = {
    "empty": b"",
    "NUL bytes": bytes(4096),
    "deep lists": b"[" * 100_000,
    "deep mappings": b'{"a":' * 100_000,
    "a list": b"[1, 2]",
    "a number": b"1",
    "no Unicode": b"\xff\xfe\x00\xd8",
    "a Python object": b"!!python/object/apply:os.system ['touch victim']",
    "numbers as keys": b"1: 2\nnull: 3\ntrue: {4: 5}\n",
    "a list as key": b"? [1]\n: 2\n",
    "many aliases": b"a: &a [x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1)] * 9)) for n in b"bcdefghijkl"),
    "itself": b"&a {a: *a}",
    "large": b"#" * (100 << 20),
}
"""Files instead of YAML or JSON; none of them is a configuration or a description of anything."""


def mutated(tree: Any, chance: random.Random) -> Any:
    """A deep copy with one to three values replaced, removed or named otherwise."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            break
        holder, key = chance.choice(places)
        action = chance.random()
        if action < 0.75:
            holder[key] = copy.deepcopy(chance.choice(HOSTILE))  # the next round may change it
        elif action < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[chance.choice((None, 1, "x", "\x1b[2J", ""))] = holder.pop(key)
        else:
            holder.append(copy.deepcopy(holder[key]))
    return tree


def _places(tree: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        found += [(tree, key), *_places(value)]
    return found


def damages(chance: random.Random) -> dict[str, Callable[[Path], None]]:
    """Ways to harm a file, by name."""
    at, bit = chance.random(), 1 << chance.randrange(8)

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * len(content))] ^= bit
        path.write_bytes(content)

    def replace(make: Callable[[Path], Any]) -> Callable[[Path], None]:
        def harm(path: Path) -> None:
            path.unlink()
            make(path)

        return harm

    return {
        "missing": Path.unlink,
        "empty": lambda path: path.write_bytes(b""),
        "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
        "a flipped bit": flip,
        "NUL bytes": lambda path: path.write_bytes(bytes(path.stat().st_size)),
        "a pipe": replace(os.mkfifo),
        "a folder": replace(Path.mkdir),
        "a device": replace(lambda path: path.symlink_to("/dev/zero")),
        "a link to nothing": replace(lambda path: path.symlink_to("/nothing")),
        "deep lists": lambda path: path.write_bytes(TREES["deep lists"]),
    }
