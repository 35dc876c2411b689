"""Checkpoints made of checkpoints: the mean of several of one model, the weights alone, quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftk.checkpoint import layout
from ftk.checkpoint.adapter import adapter_files_of, adapter_section, config_beside
from ftk.checkpoint.finite import refuse_non_finite
from ftk.checkpoint.index import TensorIndex, read_index
from ftk.checkpoint.load import load_model_tensors, read_config, read_trainer_state
from ftk.checkpoint.manifest import read_manifest
from ftk.checkpoint.quantize import QUANTIZATION, refuse_quantized, section_of
from ftk.checkpoint.save import refuse_to_replace, save_checkpoint
from ftk.checkpoint.weights import has_tokenizer, tokenizer_of
from ftk.config.changes import FREE
from ftk.config.options import options_of
from ftk.errors import UserError, counted
from ftk.files import temporary_folder
from ftk.modules.quantization import Quantization
from ftk.registry import MODELS

_NOT_MERGED = (QUANTIZATION, layout.ADAPTER)  # sections of a configuration


def average_checkpoints(
    inputs: Sequence[str | Path], output: str | Path, *, ema: bool = False, overwrite: bool = False
) -> Path:
    """Write a checkpoint whose weights are the mean of the inputs' weights.

    Floating-point tensors are summed in float64 and rounded once to their dtype; others (counters), the configuration
    and the tokenizer are those of the newest input. The optimizer and moving averages are not saved.

    Args:
        inputs: checkpoints of one model, two or more.
        ema: use the moving averages of the weights instead of the weights.

    Returns:
        `output`.

    Raises:
        UserError: fewer than two inputs, or inputs that differ in model or tokenizer (the first difference is
            named); an input without a moving average, or with weights that are not finite.
        BrokenCheckpoint: an input is not whole.
    """
    output = Path(output)
    refuse_to_replace(output, overwrite=overwrite)
    folders = [layout.resolve_checkpoint(path) for path in inputs]
    for folder in folders:
        refuse_quantized(folder, "a mean")
    if len(set(folders)) < 2:
        raise UserError(f"{len(set(folders))} checkpoint given; a mean needs two or more")
    for folder in folders[1:]:
        difference = first_difference(folders[0], folder)
        if difference is not None:
            raise UserError(f"{folders[0]} and {folder} are not of the same model: {difference}")

    states = [read_trainer_state(folder) for folder in folders]
    newest = max(range(len(folders)), key=lambda i: (states[i].get("num_updates") or 0, i))
    mean = _finite_tensors(folders[newest], ema)
    once = {id(tensor): name for name, tensor in mean.items()}.values()  # tied tensors by one of their names
    sums = {name: mean[name].double() for name in once if mean[name].is_floating_point()}
    for i, folder in enumerate(folders):
        if i != newest:
            tensors = _finite_tensors(folder, ema)
            for name, total in sums.items():
                total += tensors[name]
    for name, total in sums.items():
        mean[name].copy_(total / len(folders))

    origin = {"average_of": [str(folder) for folder in folders]}
    return _save_weights(folders[newest], output, mean, origin, ema, overwrite)


def export_weights(source: str | Path, output: str | Path, *, ema: bool = False, overwrite: bool = False) -> Path:
    """Write a checkpoint with only weights, configuration and tokenizer.

    Args:
        source: a checkpoint, or a run's folder.
        ema: write the moving average of the weights as the weights.

    Returns:
        `output`.

    Raises:
        UserError: `source` is no checkpoint, has no moving average, or has weights that are not finite.
        BrokenCheckpoint: it is not whole.
    """
    output = Path(output)
    refuse_to_replace(output, overwrite=overwrite)
    folder = layout.resolve_checkpoint(source)
    return _save_weights(folder, output, _finite_tensors(folder, ema), {"exported_from": str(folder)}, ema, overwrite)


def save_quantized(
    source: str | Path,
    output: str | Path,
    model: nn.Module,
    how: Quantization,
    *,
    ema: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a quantised model as a checkpoint, which is loaded as any other.

    Args:
        source: the checkpoint that the model was loaded from, which has the configuration and the tokenizer.
        model: after `quantize_model(model, how)`.
        how: how it was quantised.
        ema: whether it was loaded with the moving average of its weights; noted in the checkpoint.

    Raises:
        UserError: `output` exists.
    """
    folder = layout.resolve_checkpoint(source)
    config = read_config(folder) | {QUANTIZATION: section_of(how)}
    return _save_weights(folder, Path(output), model, {"exported_from": str(folder)}, ema, overwrite, config)


def save_merged(
    source: Path,
    output: str | Path,
    model: nn.Module,
    *,
    adapter: str | Path,
    ema: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a model whose adapter has been merged as a plain checkpoint.

    Args:
        source: the folder of its weights, a checkpoint or another program's, which has configuration and tokenizer.
        model: after `ftk.modules.adapters.adapt.make_plain`.
        adapter: where that was, noted in the checkpoint; an adapter alone gives its task, too.
        ema: whether it was loaded with the moving average; noted, too.

    Raises:
        UserError: `output` exists, or a weight is not finite.
    """
    refuse_non_finite(model.state_dict(), source)
    alone = adapter if layout.is_adapter(Path(adapter)) else None
    config = {key: value for key, value in config_beside(source, alone).items() if key not in _NOT_MERGED}
    origin, output = {"merged_from": str(adapter)}, Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(output.with_name(f"{output.name}.tokenizer")) as scratch:
        tokenizer = source / layout.TOKENIZER
        if not tokenizer.is_dir() and has_tokenizer(source):
            tokenizer = scratch / layout.TOKENIZER
            tokenizer_of(source).save(tokenizer)
        return _save_weights(source, output, model, origin, ema, overwrite, config, tokenizer)


def _finite_tensors(folder: Path, ema: bool) -> dict[str, torch.Tensor]:
    tensors = load_model_tensors(folder, ema=ema)
    refuse_non_finite(tensors, folder)
    return tensors


def _save_weights(
    source: Path,
    output: Path,
    model: nn.Module | dict[str, torch.Tensor],
    origin: dict[str, Any],
    ema: bool,
    overwrite: bool,
    config: dict[str, Any] | None = None,
    tokenizer: Path | None = None,
) -> Path:
    """Write weights with the configuration and the tokenizer of a checkpoint, unless others are given."""
    config, tokenizer = config or read_config(source), tokenizer or source / layout.TOKENIZER
    state = read_trainer_state(source)
    kept = {key: state[key] for key in ("num_updates", "tokenizer") if key in state}
    return save_checkpoint(
        output,
        model=model,
        trainer_state=kept | origin | ({"ema": True} if ema else {}),
        config=config,
        adapter_files=adapter_files_of(config),
        tokenizer_folder=tokenizer if tokenizer.is_dir() else None,
        overwrite=overwrite,
    )


def newest_checkpoints(run_folder: str | Path, count: int) -> list[Path]:
    """Return the `count` newest checkpoints of a run, the oldest of them first.

    Raises:
        UserError: the run has fewer.
    """
    found = layout.numbered_checkpoints(Path(run_folder))
    if len(found) < count:
        raise UserError(f"{run_folder}: has {counted(len(found), 'checkpoint')} (checkpoint_N), {count} were requested")
    return found[:count][::-1]


def first_difference(left: Path, right: Path) -> str | None:
    """The first difference between the models or tokenizers of two checkpoints; None if there is none."""
    parts = (_shapes(read_index(left / layout.MODEL)), _shapes(read_index(right / layout.MODEL)))
    for what, (one, other) in {
        "model option": (_model_options(left), _model_options(right)),
        "adapter option": (adapter_section(read_config(left)), adapter_section(read_config(right))),
        "parameter": parts,
        "tokenizer file": (_tokenizer_files(left), _tokenizer_files(right)),
    }.items():
        for name in [*one, *(name for name in other if name not in one)]:
            if name not in other or name not in one:
                return f"{what} {name} is only in {left if name in one else right}"
            if one[name] != other[name]:
                return f"{what} {name} is {one[name]} in the first, {other[name]} in the second"
    return None


def _shapes(index: TensorIndex) -> dict[str, str]:
    return {
        name: f"{str(stored.dtype).removeprefix('torch.')}{list(stored.shape)}"
        for name, stored in index.tensors.items()
    }


def _model_options(folder: Path) -> dict[str, Any]:
    """Model options that affect the weights; how attention is computed, for example, may differ."""
    options = dict(read_config(folder).get("model") or {})
    name = str(options.get("_name"))
    if name not in MODELS or (config := MODELS.get(name).config) is None:
        return options
    free = {option.name for option in options_of("model", config) if option.resume == FREE}
    return {name: value for name, value in options.items() if name not in free}


def _tokenizer_files(folder: Path) -> dict[str, str]:
    prefix = f"{layout.TOKENIZER}/"
    return {n: record.sha256 for n, record in read_manifest(folder).items() if n.startswith(prefix)}
