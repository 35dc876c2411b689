"""Checkpoints of the original GLM (THUDM/GLM), and others in its form, to ftk's and back.

Names and cuts are in `ftk.models.glm.convert`. The original's folder, as its DeepSpeed and plain forms have it:

    latest_checkpointed_iteration.txt, latest      "150000", or a tag such as "best"
    150000/mp_rank_00_model_states.pt              {"module": state dict, "iteration": 150000, ...}
    150000/mp_rank_01_model_states.pt              and so on, one part for each model-parallel rank
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftk.errors import UserError, counted
from ftk.files import naming, new_file_for_torch, read_bytes, write_whole
from ftk.models import model_config
from ftk.models.config import TransformerConfig
from ftk.models.conversion import AdamState, Contents
from ftk.models.glm import ORIGINAL_FAMILIES
from ftk.models.glm import convert as names
from ftk.models.glm.original_adam import original_state, read_original_state
from ftk.models.glm.original_form import OriginalGLMConfig
from ftk.models.renames import LazyTensors
from ftk.models.torch_file import read_tensor_file

LATEST_FILES = ("latest_checkpointed_iteration.txt", "latest")

# GLM-10B-Chinese was trained with [gMASK] and <|endofpiece|> sharing an id; the layout of --fix-command-token
# gives [gMASK] a row of its own, which is to hold what the shared row learned.
CHINESE_SHARED_ROW = 50007
CHINESE_GMASK_ROW = 50009

_MAX_TAG_BYTES = 1 << 12

_PART = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_PARTS = "mp_rank_*_model_states.pt"


class OriginalGLM:
    """Folders of the original's mp_rank_XX files, weights in the dtype they are stored in, with Adam's moments."""

    def __init__(self, config: OriginalGLMConfig) -> None:
        self.config = config

    @staticmethod
    def recognises(folder: Path) -> bool:
        """By the tracker, too: whatever is trained with DeepSpeed has parts of these names, and `latest`."""
        tracker, parent = LATEST_FILES[0], folder.absolute().parent
        if (folder / tracker).is_file():
            return any(folder.glob(f"*/{_PARTS}"))
        return (parent / tracker).is_file() and any(folder.glob(_PARTS))

    def read(self, source: Path) -> Contents:
        options = self.config
        _iteration_folder(source)  # first: whether there is one at all
        if (options.num_attention_heads is None) == (options.architecture is None):
            raise UserError("the original does not store its number of heads; give `arch` or `num_attention_heads`")
        preset = _preset(options.architecture) if options.architecture is not None else None
        heads = preset.num_attention_heads if preset is not None else options.num_attention_heads
        assert heads is not None
        original = read_original(source)
        with _wrong_shapes_named(original.folder):
            shape = names.config_from_original(original.state_dict, heads)
            tensors = names.from_original(original.state_dict, shape)
            adam = original.adam and original.adam.renamed(lambda moments: names.from_original(moments, shape))
        if options.copy_gmask_row:
            tensors = _with_gmask_row(tensors, original.folder)
        model, family = names.family_of(original.state_dict)
        config = _with_preset(shape, preset, options.architecture, original.folder, family.title)
        return Contents(
            model=model,
            config=config,
            tensors=LazyTensors.of(tensors),
            task=family.task(config),
            arch=options.architecture,
            num_updates=original.iteration,
            place=original.folder,
            adam=adam,
        )

    def write(self, folder: Path, contents: Contents) -> Path:
        if contents.model not in ORIGINAL_FAMILIES:
            models = " and ".join(map(repr, ORIGINAL_FAMILIES))
            raise UserError(
                f"{contents.place}: its model is {contents.model!r}; only {models} have the original's form"
            )
        config, num_parts, iteration = contents.config, self.config.model_parallel_size, contents.num_updates or 0
        state_dict = names.to_original(contents.tensors.all(), config)
        names.check_num_parts(state_dict, config.num_attention_heads, num_parts)
        parts: list[dict[str, Any]] = [
            {"module": part, "iteration": iteration} for part in names.split_parts(state_dict, num_parts)
        ]
        if contents.adam is not None:
            adam = contents.adam.renamed(lambda tensors: names.to_original(tensors, config))
            states = original_state(adam, num_parts, names.split_parts)
            for part, state in zip(parts, states, strict=True):
                part["optimizer"] = state
        (folder / str(iteration)).mkdir()
        for rank, part in enumerate(parts):
            path = folder / str(iteration) / f"mp_rank_{rank:02d}_model_states.pt"
            with naming(path), new_file_for_torch(path) as file:
                torch.save(part, file)
        for name in LATEST_FILES:
            write_whole(folder / name, str(iteration))
        return Path(str(iteration))


@dataclass(frozen=True)
class Original:
    """A checkpoint of the original, its parts merged."""

    state_dict: dict[str, Tensor]  # the original's names and layouts
    iteration: int | None
    folder: Path  # where the parts lie
    adam: AdamState | None = None  # in the original's names and layouts, too


def read_original(source: str | Path) -> Original:
    """Read a checkpoint of the original and merge its parts; nothing but plain data is unpickled.

    Raises:
        UserError: no original checkpoint there, or one that is damaged or holds more than plain data.
    """
    folder = _iteration_folder(Path(source))
    ranks = {}
    for path in folder.iterdir():
        if match := _PART.fullmatch(path.name):
            ranks[int(match[1])] = path
    if not ranks:
        raise UserError(f"{folder}: holds no mp_rank_XX_model_states.pt")
    missing = [f"{rank:02d}" for rank in range(max(ranks) + 1) if rank not in ranks]
    if missing:
        raise UserError(
            f"{folder}: has {counted(len(ranks), 'part')} up to mp_rank_{max(ranks):02d}, but not {missing[0]}"
        )
    parts = [_read_part(ranks[rank]) for rank in range(len(ranks))]
    iteration = parts[0].get("iteration")
    if type(iteration) is not int or not 0 <= iteration < 1 << 63:
        iteration = int(folder.name) if folder.name.isdecimal() and len(folder.name) < 19 else None
    with _wrong_shapes_named(folder):
        state_dict = names.merge_parts([part["module"] for part in parts])
        adam = read_original_state(parts, names.merge_parts, folder)
    return Original(state_dict, iteration, folder, adam)


@contextmanager
def _wrong_shapes_named(folder: Path) -> Iterator[None]:
    """Tensors of shapes that a GLM has not cannot be merged, cut or reordered; torch says so in its own words."""
    try:
        yield
    except (IndexError, RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{folder}: its tensors do not have the shapes of a GLM ({why:.200})") from error


def _iteration_folder(source: Path) -> Path:
    """Follow `latest_checkpointed_iteration.txt` or `latest`; `source` may be the iteration's folder, too."""
    if not source.is_dir():
        what = "is a file" if source.exists() else "no such folder"
        raise UserError(f"{source}: {what}; the folder of an original GLM checkpoint is meant here")
    if any(_PART.fullmatch(path.name) for path in source.iterdir()):
        return source
    for name in LATEST_FILES:
        path = source / name
        if path.is_file():
            tag = read_bytes(path, _MAX_TAG_BYTES).decode("utf-8", "replace").strip().strip("\0")
            if not tag or Path(tag).name != tag or tag == "..":
                raise UserError(f"{path}: says {tag[:40]!r}; expected the name of a folder next to it")
            if not (source / tag).is_dir():
                raise UserError(f"{path}: says {tag!r}, but there is no folder {source / tag}")
            return source / tag
    raise UserError(
        f"{source}: is no original GLM checkpoint (neither {' nor '.join(LATEST_FILES)} nor mp_rank_XX files)"
    )


def _read_part(path: Path) -> dict[str, Any]:
    """Read one part as a mapping with "module", the state dict."""
    content = read_tensor_file(path)
    if isinstance(content, dict) and "module" not in content:
        content = {"module": content}  # a bare state dict
    module = content["module"] if isinstance(content, dict) else None
    if not isinstance(module, dict) or not module:
        raise UserError(f"{path}: has no state dict under 'module'")
    for name, value in module.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(f"{path}: {name!r} under 'module' is not a tensor; is this a checkpoint of GLM?")
    return dict(content)


def _preset(arch: str) -> TransformerConfig:
    model, preset = model_config(arch)
    if model not in ORIGINAL_FAMILIES:
        models = " or ".join(map(repr, ORIGINAL_FAMILIES))
        raise UserError(f"`arch` {arch} is of model {model!r}; an original checkpoint is of {models}")
    assert isinstance(preset, TransformerConfig)
    return preset


def _with_preset(
    shape: TransformerConfig, preset: TransformerConfig | None, arch: str | None, folder: Path, title: str
) -> TransformerConfig:
    """Take what the weights do not show from the architecture, and check what they do."""
    if preset is None:
        return shape
    if type(preset) is not type(shape):
        raise UserError(f"{folder}: its parameters have the names of {title}; `arch` {arch} is of another model")
    for name in ("num_layers", "hidden_size", "inner_size", "block_positions"):
        if getattr(shape, name) != getattr(preset, name):
            raise UserError(
                f"{folder}: has {name} {getattr(shape, name)}, `arch` {arch} has {getattr(preset, name)};"
                " choose another `arch`, or give `num_attention_heads` instead"
            )
    return dataclasses.replace(preset, vocab_size=shape.vocab_size, max_positions=shape.max_positions)


def _with_gmask_row(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    embedding = tensors["token_embedding.weight"]  # [V, H]
    if embedding.size(0) <= CHINESE_GMASK_ROW:
        raise UserError(
            f"{folder}: its vocabulary of {embedding.size(0)} has no row {CHINESE_GMASK_ROW};"
            " `copy_gmask_row` is for GLM-10B-Chinese alone"
        )
    embedding = embedding.clone()
    embedding[CHINESE_GMASK_ROW] = embedding[CHINESE_SHARED_ROW]
    return {**tensors, "token_embedding.weight": embedding}
