"""Which pairs of `.bin/.idx` in a folder are which split: ours, Megatron's, fairseq's, with or without targets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ftk.errors import UserError

SOURCE, TARGET = "source", "target"
_FAIRSEQ = re.compile(r"(?P<split>.+)\.(?P<source>[^.-]+)-(?P<target>[^.-]+)\.(?P<side>[^.-]+)")
_NO_LANGUAGE = "None"  # fairseq-preprocess writes train.en-None.en for text without a translation


class NoSplit(UserError):
    """A folder has no split of this name."""


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split, by their names without `.bin` and `.idx`.

    Attributes:
        source: the documents.
        target: what belongs to each of them (line i to line i); None where there is only text.
        languages: how the two sides are called.
    """

    source: str
    target: str | None = None
    languages: tuple[str, str] = (SOURCE, TARGET)


def find_splits(folder: Path, source_lang: str | None = None, target_lang: str | None = None) -> dict[str, SplitFiles]:
    """The splits of a folder: `NAME.idx`; with targets `NAME.source.idx` (ours) or `NAME.en-de.en.idx` (fairseq's).

    Args:
        folder: holds .idx files.
        source_lang, target_lang: which of several language pairs, and in which direction; None: the only one,
            as it was written.

    Raises:
        UserError: the languages are not those of the files, one side of a pair is missing, or several language
            pairs are there and none was chosen.
    """
    stems = sorted(path.stem for path in folder.glob("*.idx"))
    splits: dict[str, SplitFiles] = {}
    pairs: dict[tuple[str, tuple[str, str]], dict[str, str]] = {}
    for stem in stems:
        written = _FAIRSEQ.fullmatch(stem)
        split, _, side = stem.rpartition(".")
        if written and written["side"] in (written["source"], written["target"]):
            languages = written["source"], written["target"]
            pairs.setdefault((written["split"], languages), {})[written["side"]] = stem
        elif split and side in (SOURCE, TARGET):
            pairs.setdefault((split, (SOURCE, TARGET)), {})[side] = stem
        else:
            splits[stem] = SplitFiles(stem)
    wanted = {name for name in (source_lang, target_lang) if name is not None}
    known = sorted({name for _, languages in pairs for name in languages if name != _NO_LANGUAGE})
    if unknown := wanted - set(known):
        there = f"there are: {', '.join(known)}" if known else "its files are of no languages"
        raise UserError(f"{folder} holds no language {', '.join(sorted(unknown))}; {there}")
    for (split, languages), sides in pairs.items():
        if not wanted <= set(languages):
            continue
        if split in splits:
            raise UserError(
                f"{folder} holds several language pairs for {split}; choose one by --source-lang and --target-lang"
            )
        splits[split] = _in_direction(folder, split, languages, sides, source_lang, target_lang)
    return splits


def _in_direction(
    folder: Path,
    split: str,
    languages: tuple[str, str],
    sides: dict[str, str],
    source_lang: str | None,
    target_lang: str | None,
) -> SplitFiles:
    source, target = languages
    if source_lang == target or target_lang == source:
        source, target = target, source
    if _NO_LANGUAGE in languages:
        return SplitFiles(next(iter(sides.values())), None, languages)
    for side in (source, target):
        if side not in sides:
            there = next(iter(sides.values()))
            raise UserError(f"{folder}: {there}.idx is one side of {split}; the other side ({side}) is missing")
    return SplitFiles(sides[source], sides[target], (source, target))
