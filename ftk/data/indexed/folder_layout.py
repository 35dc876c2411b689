"""Which pairs of `.bin/.idx` in a folder are which split: ours, Megatron's, fairseq's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ftk.errors import UserError

SPLITS = ("train", "valid", "test")  # the usual ones, in this order
_SIDE = re.compile(r"(?P<split>.+)\.(?P<source>[^.-]+)-(?P<target>[^.-]+)\.(?P=source)")
_MONOLINGUAL = re.compile(r"(?P<split>.+)\.(?P<language>[^.-]+)-None\.(?P=language)")


class NoSplit(UserError):
    """A folder has no split of this name."""


def find_splits(folder: Path) -> dict[str, str]:
    """Split -> name of its files without `.bin` and `.idx`.

    `NAME.idx` is the split NAME, and so is `NAME.en-None.en.idx`, which fairseq-preprocess writes for text without a
    translation; where there are several of them, each is a split that is called as its files are, and so is each side
    of a translation (`NAME.en-de.en.idx`).

    Args:
        folder: holds .idx files.
    """
    stems = sorted(path.stem for path in folder.glob("*.idx"))
    plain = {stem: found["split"] if (found := _MONOLINGUAL.fullmatch(stem)) else stem for stem in stems}
    counts = Counter(plain.values())
    return {name if counts[name] == 1 else stem: stem for stem, name in plain.items()}


def find_pairs(splits: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Split -> names of the files of its two sides, of the translations among the splits of `find_splits`.

    Raises:
        UserError: two translations are of the same split.
    """
    found: dict[str, tuple[str, str]] = {}
    for stem in splits.values():
        side = _SIDE.fullmatch(stem)
        if side is None or side["split"] in splits:
            continue
        other = f"{stem.removesuffix(side['source'])}{side['target']}"
        if other not in splits:
            continue
        if side["split"] in found:
            raise UserError(
                f"{found[side['split']][0]} and {stem} are both the split {side['split']}; keep the translations of "
                "each pair of languages in a folder of their own"
            )
        found[side["split"]] = stem, other
    return found


def sides_of(stem: str) -> tuple[str, str]:
    """The languages of a translation's files, `train.en-de.en`: ("en", "de")."""
    side = _SIDE.fullmatch(stem)
    assert side is not None, "of `find_pairs`"
    return side["source"], side["target"]
