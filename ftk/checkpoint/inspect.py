"""Summary of a checkpoint: model, parameters, progress, files."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ftk.checkpoint import layout
from ftk.checkpoint.adapter import adapter_section
from ftk.checkpoint.checking import find_problems, some_problems
from ftk.checkpoint.contents import config_of, content_problems, trainer_state_of
from ftk.checkpoint.finite import non_finite, what_is_wrong
from ftk.checkpoint.index import StoredTensor, read_index
from ftk.checkpoint.layout import BrokenCheckpoint
from ftk.checkpoint.manifest import index_folders, read_manifest
from ftk.checkpoint.reading import stored_pieces
from ftk.errors import visible
from ftk.files import read_json
from ftk.terminal import in_columns

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """Tensors of one shape whose names differ only in the layer number."""

    name: str  # "layers.{0..3}.attention.qkv.weight"
    shape: list[int]
    dtype: str
    count: int
    elements: int  # sum over all
    bytes: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """The output of `ftk-checkpoint inspect`."""

    path: str
    problems: list[str]  # wrong sizes and contents of files, and weights that are not finite; nothing is hashed
    model: dict[str, Any]
    quantization: dict[str, Any]  # empty for trained weights
    adapter: dict[str, Any]  # empty without one
    task: dict[str, Any]
    tensors: list[TensorRow]
    tied: dict[str, str]
    parameters: int
    model_bytes: int
    has_optimizer: bool
    extra: dict[str, int]  # further sets of tensors ("ema": a moving average of the weights) -> bytes
    tokenizer: str | None
    trainer_state: dict[str, int | float | str]  # its numbers and strings; nested ones as "best.value"
    files: dict[str, int]  # name -> bytes


def inspect_checkpoint(path: str | Path) -> Summary:
    """Summarise a checkpoint; its tensors are only checked for NaN and infinity.

    Raises:
        UserError: `path` is no checkpoint.
        BrokenCheckpoint: the manifest, the configuration, the state or the model's index is damaged.
    """
    folder = layout.resolve_checkpoint(path)
    files = read_manifest(folder)
    problems = find_problems(folder, files, contents=lambda name: False)
    fatal = [p for p in problems if p.startswith((layout.CONFIG, layout.TRAINER_STATE, f"{layout.MODEL}/index"))]
    if not problems:
        problems = content_problems(folder, files)
        fatal = problems
    if fatal:
        raise BrokenCheckpoint(f"{folder}: is incomplete or damaged: {some_problems(problems)}")
    config, state = ({}, {}) if problems else (config_of(folder), trainer_state_of(folder))
    index = read_index(folder / layout.MODEL)
    rows = _rows(index.tensors)
    return Summary(
        path=str(folder),
        problems=problems or _not_finite(folder, [layout.MODEL, *(n for n in index_folders(files) if n == layout.EMA)]),
        model=dict(config.get("model") or {}),
        quantization=dict(config.get("quantization") or {}),
        adapter=adapter_section(config),
        task=dict(config.get("task") or {}),
        tensors=rows,
        tied=dict(index.aliases),
        parameters=sum(row.elements for row in rows),
        model_bytes=sum(row.bytes for row in rows),
        has_optimizer=f"{layout.OPTIMIZER}/index.json" in files,
        extra={
            name: sum(math.prod(t.shape) * t.dtype.itemsize for t in read_index(folder / name).tensors.values())
            for name in index_folders(files)
            if name not in (layout.MODEL, layout.OPTIMIZER) and not problems
        },
        tokenizer=_tokenizer_name(folder),
        trainer_state=dict(_scalars(state)),
        files={name: record.size for name, record in files.items()},
    )


def render(summary: Summary) -> str:
    """A summary as text."""
    lines = [summary.path]
    lines += [f"  PROBLEM  {problem}" for problem in summary.problems]
    options = {k: v for k, v in summary.model.items() if k not in ("_name", "arch")}
    name = summary.model.get("_name", "unknown")
    arch = summary.model.get("arch")
    lines.append(f"model      {name}" + (f" ({arch})" if arch else ""))
    lines += [f"           {key} {value}" for key, value in options.items()]
    if summary.quantization:
        lines.append("quantised  " + ", ".join(f"{key} {value}" for key, value in summary.quantization.items()))
    if summary.adapter:
        lines.append("adapter    " + ", ".join(f"{key} {value}" for key, value in summary.adapter.items() if value))
    lines.append(f"task       {summary.task.get('_name', 'unknown')}")
    lines.append(f"tokenizer  {summary.tokenizer or 'none: this checkpoint cannot read text'}")
    lines.append(f"optimizer  {'kept: training can continue' if summary.has_optimizer else 'none'}")
    for name, size in summary.extra.items():
        what = "moving average of the weights, taken with `ema`" if name == layout.EMA else "further tensors"
        lines.append(f"{name:<10} {what} ({size_text(size)})")
    for key, value in summary.trainer_state.items():
        lines.append(f"trainer    {key} {value}")
    lines += ["", *_table(summary)]
    lines += [f"{alias} is {name}" for alias, name in summary.tied.items()]
    lines += ["", "files"]
    lines += [f"{size_text(size):>10}  {name}" for name, size in summary.files.items()]
    return visible("\n".join(lines))


def as_json(summary: Summary) -> str:
    """A summary as JSON."""
    text = json.dumps(dataclasses.asdict(summary), indent=1, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate becomes its JSON escape


def _table(summary: Summary) -> list[str]:
    header = ("parameter", "shape", "dtype", "elements", "size")
    cells = [
        (
            row.name,
            "x".join(map(str, row.shape)) or "scalar",
            row.dtype,
            f"{row.elements:,}",
            size_text(row.bytes),
        )
        for row in summary.tensors
    ]
    cells.append(("all", "", "", f"{summary.parameters:,}", size_text(summary.model_bytes)))
    return in_columns([header, *cells], left=(0, 1, 2))


def _rows(tensors: dict[str, StoredTensor]) -> list[TensorRow]:
    """Merge the tensors of equal layers into one row."""
    groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for name, stored in tensors.items():
        dtype = str(stored.dtype).removeprefix("torch.")
        groups.setdefault((_LAYER_NUMBER.sub("*", name), stored.shape, dtype), []).append(name)
    rows = []
    for (pattern, shape, dtype), names in groups.items():
        first = tensors[names[0]]
        elements = len(names) * math.prod(shape)
        rows.append(
            TensorRow(
                name=names[0] if len(names) == 1 else _range(pattern, names),
                shape=list(shape),
                dtype=dtype,
                count=len(names),
                elements=elements,
                bytes=elements * first.dtype.itemsize,
            )
        )
    return rows


def _range(pattern: str, names: list[str]) -> str:
    """Return `layers.{0..3}.x` for the names layers.0.x to layers.3.x, else the pattern with its count."""
    if pattern.count("*") == 1:
        numbers = sorted(int(match[0]) for name in names if (match := _LAYER_NUMBER.search(name)))
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return pattern.replace("*", f"{{{numbers[0]}..{numbers[-1]}}}")
    return f"{pattern} ({len(names)} of them)"


def _scalars(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, int | float | str]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float, str)):
            yield f"{prefix}{key}", value


def _not_finite(folder: Path, parts: list[str]) -> list[str]:
    """A line for each of the parts whose tensors hold NaN or infinity."""
    problems = []
    for part in parts:
        pieces = stored_pieces(folder / part, read_index(folder / part))
        bad = list(dict.fromkeys(name for name, piece in pieces if non_finite({name: piece})))
        if bad:
            problems.append(f"{part}: {what_is_wrong(bad)}")
    return problems


def _tokenizer_name(folder: Path) -> str | None:
    path = folder / layout.TOKENIZER / "ftk_tokenizer.json"
    if not path.is_file():
        return None
    description = layout.read_part(path, read_json)
    return str(description.get("name", "unnamed")) if isinstance(description, dict) else "unnamed"


def size_text(count: int) -> str:
    """Return a number of bytes as text: 987 B, 1.2 kB, 3.4 MB, 5.6 GB."""
    power = next(power for power in (0, 1, 2, 3) if count < 1000 ** (power + 1) or power == 3)
    return f"{count} B" if power == 0 else f"{count / 1000**power:.1f} {('kB', 'MB', 'GB')[power - 1]}"
