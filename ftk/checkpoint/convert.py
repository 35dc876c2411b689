"""Checkpoints of the original GLM (THUDM/GLM) to ftk's and back; names and layouts: `ftk.models.glm.convert`.

The original's folder, as its DeepSpeed and plain forms have it:

    latest_checkpointed_iteration.txt, latest      "150000", or a tag such as "best"
    150000/mp_rank_00_model_states.pt              {"module": state dict, "iteration": 150000, ...}
    150000/mp_rank_01_model_states.pt              and so on, one part for each model-parallel rank
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftk.checkpoint import layout
from ftk.checkpoint.bounded import bounded_by
from ftk.checkpoint.convert_optimizer import (
    AdamState,
    checkpoint_part,
    original_state,
    read_checkpoint_part,
    read_original_state,
)
from ftk.checkpoint.finite import refuse_non_finite
from ftk.checkpoint.load import load_model_tensors, read_config, read_trainer_state
from ftk.checkpoint.manifest import new_file_for_torch
from ftk.checkpoint.quantize import refuse_quantized
from ftk.checkpoint.save import refuse_to_replace, write_snapshot
from ftk.checkpoint.snapshot import take_snapshot
from ftk.config.build import build_options
from ftk.errors import UserError, counted
from ftk.files import naming, open_regular, put_in_place, read_bytes, reason, sync_tree, temporary_folder, write_whole
from ftk.models.glm import convert as names
from ftk.models.glm.config import GLMConfig

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)

LATEST_FILES = ("latest_checkpointed_iteration.txt", "latest")

# GLM-10B-Chinese was trained with [gMASK] and <|endofpiece|> sharing an id; the layout of --fix-command-token
# gives [gMASK] a row of its own, which is to hold what the shared row learned.
CHINESE_SHARED_ROW = 50007
CHINESE_GMASK_ROW = 50009

_NAMES = ("_name", "arch")  # of a model among its options

_MAX_TAG_BYTES = 1 << 12

_PART = re.compile(r"mp_rank_(\d+)_model_states\.pt")


@dataclasses.dataclass(frozen=True)
class Original:
    """A checkpoint of the original, its parts merged."""

    state_dict: dict[str, torch.Tensor]  # the original's names and layouts
    iteration: int | None
    folder: Path  # where the parts lie
    num_parts: int
    optimizer: AdamState | None = None  # in the original's names and layouts, too


def convert_from_original(
    source: str | Path,
    output: str | Path,
    *,
    num_attention_heads: int | None = None,
    arch: str | None = None,
    tokenizer: Tokenizer | None = None,
    copy_gmask_row: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write an ftk checkpoint with the weights of an original one, in the dtype they are stored in.

    Args:
        source: the original's folder, or the folder of one iteration in it.
        output: folder to write.
        num_attention_heads: the original does not store their number; give it or `arch`.
        arch: an architecture of ftk's, from which the number of heads and the dropouts are taken.
        tokenizer: saved with it; without one the checkpoint cannot read text.
        copy_gmask_row: GLM-10B-Chinese: copy the embedding of token 50007 to 50009, [gMASK] with
            fix_command_token.
        overwrite: replace a checkpoint of this name.

    Returns:
        `output`.

    Raises:
        UserError: no original checkpoint there, one that is damaged or holds more than plain data, or
            options that do not fit it.
    """
    output = Path(output)
    refuse_to_replace(output, overwrite=overwrite)
    if (num_attention_heads is None) == (arch is None):
        raise UserError("the original does not store its number of heads; give --arch or --num-attention-heads")
    preset = _preset(arch) if arch is not None else None
    original = read_original(source)
    heads = preset.num_attention_heads if preset is not None else num_attention_heads
    assert heads is not None
    with _wrong_shapes_told(original.folder):
        shape = names.config_from_original(original.state_dict, heads)
        tensors = names.from_original(original.state_dict, heads)
    config = _with_preset(shape, preset, arch, original.folder)
    _check_names(tensors, config, original.folder)
    refuse_non_finite(tensors, original.folder)
    if copy_gmask_row:
        tensors = _with_gmask_row(tensors, original.folder)
    if tokenizer is not None:
        _check_vocabulary(tokenizer, config, original.folder)

    tree = _config_tree(config, arch)
    state = {"num_updates": original.iteration, "converted_from": str(original.folder)}
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(output.with_name(f"{output.name}.tokenizer")) as folder_of_tokenizer:
        if tokenizer is not None:
            tokenizer.save(folder_of_tokenizer)
        snapshot = take_snapshot(
            model=tensors,
            trainer_state=state,
            config=tree,
            tokenizer_folder=folder_of_tokenizer if tokenizer is not None else None,
        )
        if original.optimizer is not None:
            moments = original.optimizer.renamed(lambda tensors: names.from_original(tensors, heads))
            parts = {**snapshot.parts, layout.OPTIMIZER: checkpoint_part(moments)}
            snapshot = dataclasses.replace(snapshot, parts=parts)
        return write_snapshot(output, snapshot, overwrite=overwrite)


def convert_to_original(
    source: str | Path, output: str | Path, *, num_parts: int = 1, ema: bool = False, overwrite: bool = False
) -> Path:
    """Write a checkpoint's weights, and the moments of its Adam, in the original's layout.

    Args:
        source: an ftk checkpoint of a GLM, or a run's folder.
        output: folder to write.
        num_parts: model-parallel parts.
        ema: write the moving average of the weights as the weights.
        overwrite: replace an original checkpoint of this name.

    Returns:
        The folder of the iteration, in which the parts lie.

    Raises:
        UserError: the model is no GLM, or cannot be cut into so many parts.
        BrokenCheckpoint: the checkpoint is not whole.
    """
    source, output = layout.resolve_checkpoint(source), Path(output)
    _refuse_to_replace_original(output, overwrite)
    model = read_config(source).get("model") or {}
    if model.get("_name") != "glm":
        raise UserError(f"{source}: its model is {model.get('_name')!r}; only 'glm' has the original's layout")
    refuse_quantized(source, "the original's layout")
    iteration = int(read_trainer_state(source).get("num_updates") or 0)
    config = build_options("model", GLMConfig, {name: value for name, value in model.items() if name not in _NAMES})
    heads = config.num_attention_heads

    def to_original(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return names.in_original_order(names.to_original(tensors, heads))

    tensors = load_model_tensors(source, ema=ema)
    refuse_non_finite(tensors, source)
    _check_names(tensors, config, source)
    state_dict = to_original(tensors)
    names.check_num_parts(state_dict, heads, num_parts)
    parts: list[dict[str, Any]] = [
        {"module": part, "iteration": iteration} for part in names.split_parts(state_dict, num_parts)
    ]
    moments = None if ema else read_checkpoint_part(source)  # they are not of the averaged weights
    if moments is not None:
        states = original_state(moments.renamed(to_original), num_parts, names.split_parts)
        for part, state in zip(parts, states, strict=True):
            part["optimizer"] = state

    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(output) as temporary:
        folder = temporary / str(iteration)
        folder.mkdir()
        for rank, part in enumerate(parts):
            name = f"mp_rank_{rank:02d}_model_states.pt"
            with naming(output / str(iteration) / name), new_file_for_torch(folder / name) as file:
                torch.save(part, file)
        for name in LATEST_FILES:
            write_whole(temporary / name, str(iteration))
        sync_tree(temporary)
        put_in_place(temporary, output)
    return output / str(iteration)


def read_original(source: str | Path) -> Original:
    """Read a checkpoint of the original and merge its parts; nothing but plain data is unpickled.

    Raises:
        UserError: see `convert_from_original`.
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
    with _wrong_shapes_told(folder):
        state_dict = names.merge_parts([part["module"] for part in parts])
        optimizer = read_original_state(parts, names.merge_parts, folder)
    return Original(state_dict, iteration, folder, len(parts), optimizer)


@contextmanager
def _wrong_shapes_told(folder: Path) -> Iterator[None]:
    """Tensors of shapes that a GLM has not cannot be merged, cut or reordered; torch says so in its own words."""
    try:
        yield
    except (IndexError, RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{folder}: its tensors have not the shapes of a GLM ({why:.200})") from error


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
                raise UserError(f"{path}: says {tag[:40]!r}; the name of a folder beside it is meant there")
            if not (source / tag).is_dir():
                raise UserError(f"{path}: says {tag!r}, but there is no folder {source / tag}")
            return source / tag
    raise UserError(
        f"{source}: is no original GLM checkpoint (neither {' nor '.join(LATEST_FILES)} nor mp_rank_XX files)"
    )


def _read_part(path: Path) -> dict[str, Any]:
    """Read one part as a mapping with "module", the state dict."""
    try:
        open_regular(path).close()  # torch would wait at a pipe
        with _numpy_states_allowed():
            content = _load_tensors(path)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|global:?) ([\w.]+)", str(error))
        what = f" ({found[1]})" if found else ""
        raise UserError(
            f"{path}: holds Python objects besides tensors{what}, or is damaged; ftk does not unpickle those."
            " If you trust the file, save its weights alone:"
            " torch.save({'module': torch.load(OLD, weights_only=False)['module']}, NEW)"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({reason(error)})") from error
    except (ArithmeticError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = (str(error) or "it is empty or cut").splitlines()[0]
        raise UserError(f"{path}: cannot be read as a PyTorch file ({why})") from error
    if isinstance(content, dict) and "module" not in content:
        content = {"module": content}  # a bare state dict
    module = content["module"] if isinstance(content, dict) else None
    if not isinstance(module, dict) or not module:
        raise UserError(f"{path}: has no state dict under 'module'")
    for name, value in module.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise UserError(f"{path}: {name!r} under 'module' is not a tensor; is this a checkpoint of GLM?")
    return dict(content)


def _load_tensors(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
    return torch.load(path, map_location="cpu", weights_only=True)  # written before PyTorch 1.6


@contextmanager
def _numpy_states_allowed() -> Iterator[None]:
    """Let NumPy arrays of numbers through: the original keeps `numpy.random.get_state()` with its weights."""
    reconstruct = np.empty(0).__reduce__()[0]
    allowed: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), reconstruct]
    allowed += [(reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    with torch.serialization.safe_globals(allowed):
        yield


def _preset(arch: str) -> GLMConfig:
    from ftk.models import model_config

    model_name, preset = model_config(arch)
    if model_name != "glm" or not isinstance(preset, GLMConfig):
        raise UserError(f"--arch {arch} is of model {model_name!r}; an original GLM checkpoint is a 'glm'")
    return preset


def _with_preset(shape: GLMConfig, preset: GLMConfig | None, arch: str | None, folder: Path) -> GLMConfig:
    """Take what the weights do not show from the architecture, and check what they do."""
    if preset is None:
        return shape
    for field in ("num_layers", "hidden_size", "inner_size", "block_positions"):
        if getattr(shape, field) != getattr(preset, field):
            raise UserError(
                f"{folder}: has {field} {getattr(shape, field)}, --arch {arch} has {getattr(preset, field)};"
                " choose another --arch, or give --num-attention-heads instead"
            )
    return dataclasses.replace(preset, vocab_size=shape.vocab_size, max_positions=shape.max_positions)


def _check_names(tensors: dict[str, torch.Tensor], config: GLMConfig, folder: Path) -> None:
    """Check against the model itself, built without memory, that no weight is missing or misshapen."""
    from ftk.models.glm.model import GLM

    with bounded_by(tensors, folder), torch.device("meta"):
        expected = GLM(config).state_dict()
    for name in [*expected, *tensors]:
        if name not in tensors or name not in expected:
            where = "is missing" if name not in tensors else "has no place in the model"
            raise UserError(f"{folder}: the weight that ftk calls {name} {where}")
        if tensors[name].shape != expected[name].shape:
            found, wanted = list(tensors[name].shape), list(expected[name].shape)
            raise UserError(f"{folder}: the weight that ftk calls {name} is {found}; {wanted} fits the others")


def _with_gmask_row(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    embedding = tensors["token_embedding.weight"]  # [V, H]
    if embedding.size(0) <= CHINESE_GMASK_ROW:
        raise UserError(
            f"{folder}: its vocabulary of {embedding.size(0)} has no row {CHINESE_GMASK_ROW};"
            " --copy-gmask-row is for GLM-10B-Chinese alone"
        )
    embedding = embedding.clone()
    embedding[CHINESE_GMASK_ROW] = embedding[CHINESE_SHARED_ROW]
    return {**tensors, "token_embedding.weight": embedding}


def _check_vocabulary(tokenizer: Tokenizer, config: GLMConfig, folder: Path) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the model has {config.vocab_size} tokens, the tokenizer {tokenizer.vocab_size};"
            " this is not the tokenizer it was trained with"
        )
    if tokenizer.padded_vocab_size() != config.vocab_size:
        logger.warning(
            "%s: the model has %d tokens, the tokenizer %d when padded; is it the one it was trained with?",
            folder, config.vocab_size, tokenizer.padded_vocab_size(),
        )  # fmt: skip


def _config_tree(config: GLMConfig, arch: str | None) -> dict[str, Any]:
    """Write the configuration that `ftk.load_model` and generation read."""
    model = {"_name": "glm"} | ({"arch": arch} if arch is not None else {}) | dataclasses.asdict(config)
    task = {
        "_name": "glm_blank",
        "seq_length": config.max_positions,
        "block_positions": config.block_positions,
    }
    return {"task": task, "model": model}


def _refuse_to_replace_original(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if not overwrite:
        raise UserError(f"{output}: exists; replace it with --overwrite or choose another name")
    if not output.is_dir() or (any(output.iterdir()) and not (output / LATEST_FILES[0]).is_file()):
        raise UserError(f"{output}: exists and is no original GLM checkpoint; it is not replaced")
