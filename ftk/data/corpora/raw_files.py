"""Which text files are which split of a raw corpus."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ftk.data.indexed.output_folder import RECORD
from ftk.data.text.files import compressed_suffix
from ftk.errors import UserError

_SUFFIXES = (".txt", ".text", ".jsonl", ".ndjson", ".json")


@dataclass
class RawFiles:
    """The files of one split: `sources` one after the other; `targets`, if any, beside them."""

    sources: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)


def find_raw_files(data: str, source_lang: str, target_lang: str) -> dict[str, RawFiles]:
    """The splits of a folder, by the names of its files, or of files that are named.

    Args:
        data: a folder with SPLIT.txt, SPLIT.jsonl (...) or SPLIT.source and SPLIT.target, each perhaps compressed;
            or `[SPLIT=]FILE`, separated by commas, where a file without a split is of "train" and one that ends
            in `source_lang` brings its partner with it.
        source_lang, target_lang: endings of sources and targets.

    Raises:
        UserError: a file or one side of a pair is missing, or a folder holds two files for a split.
    """
    folder = Path(data)
    splits = _of_folder(folder, source_lang, target_lang) if folder.is_dir() else {}
    if splits or folder.is_dir():
        if not splits:
            raise UserError(
                f"{folder} holds no text: neither SPLIT.txt or SPLIT.jsonl nor "
                f"SPLIT.{source_lang} and SPLIT.{target_lang}, e.g. train.txt"
            )
        return splits
    for part in filter(None, (part.strip() for part in data.split(","))):
        split, separator, name = part.partition("=")
        if not separator or Path(part).exists():
            split, name = "train", part
        if not Path(name).is_file():
            raise UserError(f"{name}: {'a folder, not a file' if Path(name).is_dir() else 'no such file or folder'}")
        _add_named(splits.setdefault(split, RawFiles()), name, source_lang, target_lang)
    if not splits:
        raise UserError(f"{data!r} names no file")
    return splits


def _of_folder(folder: Path, source_lang: str, target_lang: str) -> dict[str, RawFiles]:
    texts: dict[str, RawFiles] = {}
    sides: dict[str, dict[str, list[str]]] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name != RECORD):
        plain = Path(_uncompressed(path.name))
        if plain.suffix.lower() in _SUFFIXES:
            texts.setdefault(plain.stem, RawFiles()).sources.append(str(path))
        elif plain.suffix in (f".{source_lang}", f".{target_lang}") and plain.stem:
            sides.setdefault(plain.stem, {}).setdefault(plain.suffix[1:], []).append(str(path))
    splits = {split: RawFiles(both.get(source_lang, []), both.get(target_lang, [])) for split, both in sides.items()}
    for split, files in splits.items():
        for side, paths in ((source_lang, files.sources), (target_lang, files.targets)):
            if not paths:
                other = (files.sources or files.targets)[0]
                raise UserError(f"{other}: its partner {folder / split}.{side} is missing")
    for split, files in (splits or texts).items():
        for paths in (files.sources, files.targets):
            if len(paths) > 1:
                raise UserError(f"{folder}: {', '.join(Path(p).name for p in paths)} are all {split}; leave one")
    return splits or texts


def _add_named(files: RawFiles, name: str, source_lang: str, target_lang: str) -> None:
    plain = _uncompressed(name)
    is_pair = plain.endswith(f".{source_lang}")
    if files.sources and is_pair != bool(files.targets):
        raise UserError(f"{name}: pairs and texts without targets cannot be one split")
    if is_pair:
        partner = plain[: -len(source_lang)] + target_lang + name[len(plain) :]
        if not Path(partner).is_file():
            raise UserError(f"{name}: its partner {partner} is missing")
        files.targets.append(partner)
    files.sources.append(name)


def _uncompressed(name: str) -> str:
    suffix = compressed_suffix(name)
    return name[: -len(suffix)] if suffix else name
