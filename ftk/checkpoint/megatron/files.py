"""The files of a checkpoint of Megatron-LM: which there are, what stands in each, and how they form one model.

    latest_checkpointed_iteration.txt                  "100", or "release"
    iter_0000100/mp_rank_00/model_optim_rng.pt         {"model": state dict, "args": Namespace, "iteration": 100, ...}
    iter_0000100/mp_rank_01_000/model_optim_rng.pt     tensor parallel rank 1 of pipeline stage 0; of an interleaved
                                                       pipeline "model0", "model1", ... instead of "model"

Sources, in NVIDIA/Megatron-LM: megatron/training/checkpointing.py (files, versions), tools/checkpoint/loader_base.py
(in which order layers stand).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ftk.checkpoint.layout import read_part
from ftk.checkpoint.megatron.parameters import EMBEDDING, LAYER, named
from ftk.errors import UserError, naming_place
from ftk.files import read_bytes
from ftk.models.parts import check_same_names
from ftk.models.torch_file import read_tensor_file

LATEST = "latest_checkpointed_iteration.txt"
FILES = "mp_rank_*/model*_rng.pt"  # model_optim_rng.pt; model_rng.pt where the optimizer has files of its own
DISTRIBUTED = ("common.pt", ".metadata", "metadata.json")  # of the formats torch_dist, torch_dcp and zarr
IN_FOLDERS = (f"*/{FILES}", f"iter_*/{DISTRIBUTED[0]}", f"release/{DISTRIBUTED[0]}")  # of iterations
_PART = re.compile(r"mp_rank_(\d{2,9})(?:_(\d{3,9}))?")  # tensor parallel rank, pipeline stage

# A Namespace gets attributes and a BytesIO gets bytes, nothing else happens; the former holds the options, the latter
# what Transformer Engine adds to a state dict. Classes of Megatron (enumerations among the options, loss scalers of
# 2019) say nothing about the model and are not looked at.
_CLASSES = (argparse.Namespace, io.BytesIO)
_IGNORED = r"megatron\.[\w.]+|fp16\.[\w.]+"

_VERSIONS = (0, 1, 2, 3)
_PLAIN = (bool, int, float, str, list, tuple, type(None))


class Part(NamedTuple):
    """What is read from one file: the state dicts of its model chunks, and their description."""

    chunks: list[dict[str, Tensor]]
    options: Mapping[str, Any] | None
    version: float  # of the order of rows of queries, keys and values
    iteration: int | None


@dataclasses.dataclass(frozen=True)
class Parts:
    """The files of one checkpoint.

    Attributes:
        folder: of the iteration.
        files: by pipeline stage, then by tensor parallel rank.
    """

    folder: Path
    files: Sequence[Sequence[Path]]

    @functools.cached_property
    def first(self) -> Part:
        """The first file's content."""
        return _read_part(self.files[0][0])

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding, those of padding included."""
        embedding = self.first.chunks[0].get(EMBEDDING)
        if embedding is None or embedding.dim() != 2:
            raise UserError(f"there is no matrix {EMBEDDING!r}; is this a GPT model?")
        return len(embedding) * len(self.files[0])

    def tensors(self) -> dict[str, list[Tensor]]:
        """Name in the whole model -> its tensor on each tensor parallel rank; mapped from the files, where possible.

        Raises:
            UserError: the files do not belong together.
        """
        stages = [[self._same_run(path) for path in stage] for stage in self.files]
        counts = sorted({len(part.chunks) for part in itertools.chain(*stages)})
        if len(counts) > 1:
            raise UserError(f"one file holds {counts[0]} chunks of an interleaved pipeline, another {counts[-1]}")
        whole: dict[str, list[Tensor]] = {}
        num_layers = 0
        # First come the first chunks of all stages, then the second ones (`loader_base`).
        for chunk, stage in itertools.product(range(counts[0]), range(len(stages))):
            names = [path.parent.name for path in self.files[stage]]
            ranks = [part.chunks[chunk] for part in stages[stage]]
            check_same_names(dict(zip(names, ranks, strict=True)))
            numbers = [-1]
            for name in ranks[0]:
                full = name
                if layer := LAYER.fullmatch(name):
                    numbers.append(int(layer[1]))
                    full = f"decoder.layers.{num_layers + numbers[-1]}.{layer[2]}"
                if full in whole:
                    raise UserError(f"the parameter {full!r} is in two pipeline stages")
                whole[full] = [tensors[name] for tensors in ranks]
            num_layers += max(numbers) + 1
        return whole

    def _same_run(self, path: Path) -> Part:
        part = self.first if path == self.files[0][0] else _read_part(path)
        for name in ("version", "iteration"):
            mine, other = getattr(part, name), getattr(self.first, name)
            if mine != other:
                first = self.files[0][0].parent.name
                raise UserError(f"{path.parent.name} is of {name} {mine}, {first} of {name} {other}")
        return part


def find(source: Path) -> Parts:
    """The files of a checkpoint: of the iteration that the tracker names, or of this folder itself.

    Raises:
        UserError: there are none, or one is missing.
    """
    folder = _iteration_folder(source)
    files: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob(FILES)):
        match = _PART.fullmatch(path.parent.name)
        if match is None:
            raise UserError(f"{path.parent}: is of a mixture of experts, by its name; ftk has none")
        place = int(match[2] or 0), int(match[1])
        if place in files:
            raise UserError(f"{path} and {files[place]} are both of rank {place[1]} in stage {place[0]}; remove one")
        files[place] = path
    if not files:
        if _is_distributed(folder):
            raise UserError(
                f"{folder}: is in a distributed format, whose index is a pickle, which ftk does not open; to get the"
                " format torch: torchrun ... pretrain_gpt.py ... --ckpt-convert-format torch --ckpt-convert-save DIR"
            )
        raise UserError(f"{folder}: holds no mp_rank_XX/model_optim_rng.pt")
    num_stages, num_ranks = (max(numbers) + 1 for numbers in zip(*files, strict=True))
    places = ((stage, rank) for stage in range(num_stages) for rank in range(num_ranks))
    if missing := next((place for place in places if place not in files), None):
        name = f"mp_rank_{missing[1]:02d}" + (f"_{missing[0]:03d}" if num_stages > 1 else "")
        raise UserError(f"{folder}: has files of {num_ranks} x {num_stages} ranks (tensor x pipeline), but not {name}")
    return Parts(folder, [[files[stage, rank] for rank in range(num_ranks)] for stage in range(num_stages)])


def _iteration_folder(source: Path) -> Path:
    if not source.is_dir():
        what = "is a file" if source.exists() else "no such folder"
        raise UserError(f"{source}: {what}; give the folder of a Megatron-LM checkpoint")
    tracker = source / LATEST
    if not tracker.is_file():
        if any(source.glob(FILES)) or _is_distributed(source):
            return source
        below = {path.relative_to(source).parts[0] for pattern in IN_FOLDERS for path in source.glob(pattern)}
        if below:
            raise UserError(f"{source}: has no {LATEST}; name one of its folders: {', '.join(sorted(below)[-3:])}")
        raise UserError(f"{source}: is no checkpoint of Megatron-LM (neither {LATEST} nor mp_rank_XX folders)")
    text = read_part(tracker, lambda path: read_bytes(path, 1 << 12)).decode("utf-8", "replace").strip()
    if not re.fullmatch(r"release|[0-9]{1,18}", text):
        raise UserError(f"{tracker}: says {text[:40]!r}; expected the number of an iteration, or 'release'")
    folder = source / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise UserError(f"{tracker}: says {text!r}, but there is no folder {folder}")
    return folder


def _is_distributed(folder: Path) -> bool:
    return any((folder / name).is_file() for name in DISTRIBUTED)


def _read_part(path: Path) -> Part:
    content = read_tensor_file(path, _CLASSES, _IGNORED)
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no mapping; is this a checkpoint of Megatron-LM?")
    numbered = (content.get(f"model{number}") for number in itertools.count())
    chunks: list[Any] = [content["model"]] if "model" in content else [*iter(lambda: next(numbered), None)]
    if not chunks or not all(isinstance(chunk, dict) for chunk in chunks):
        raise UserError(f"{path}: has no state dict under 'model', nor under 'model0'")
    version, iteration = content.get("checkpoint_version", 0), content.get("iteration")
    if type(version) not in (int, float) or version not in _VERSIONS:
        raise UserError(f"{path}: checkpoint_version is {version!r:.40}; ftk reads {', '.join(map(str, _VERSIONS))}")
    args = content.get("args")
    options = None
    if isinstance(args, argparse.Namespace):
        options = {key: arg if isinstance(arg, _PLAIN) else type(arg).__name__ for key, arg in vars(args).items()}
    with naming_place(path):
        tensors = [named(chunk) for chunk in chunks]
    return Part(tensors, options, version, iteration if type(iteration) is int and 0 <= iteration < 1 << 63 else None)
