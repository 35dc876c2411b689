"""Checkpoints with rounded weights: written from a quantised model, and made ready to be read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ftk.checkpoint import layout
from ftk.checkpoint.load import read_config, read_trainer_state
from ftk.checkpoint.save import save_checkpoint
from ftk.errors import UserError
from ftk.modules.quantization import Quantization, prepare_quantized

QUANTIZATION = "quantization"
"""The section of config.yaml that describes how a checkpoint is quantised; absent if it is not."""


def save_quantized(
    source: str | Path,
    output: str | Path,
    model: nn.Module,
    how: Quantization,
    *,
    ema: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a quantised model as a checkpoint that is loaded as any other.

    Args:
        source: the checkpoint that it was loaded from: configuration and tokenizer.
        output: folder to write.
        model: after `quantize_model(model, how)`.
        how: what was done to it.
        ema: it was loaded with the moving average of its weights; noted in the checkpoint.
        overwrite: replace an older checkpoint of this name.

    Raises:
        UserError: there is something of that name.
    """
    folder = layout.resolve_checkpoint(source)
    tokenizer = folder / layout.TOKENIZER
    state = read_trainer_state(folder)
    origin = {"exported_from": str(folder)} | ({"ema": True} if ema else {})
    return save_checkpoint(
        output,
        model=model,
        trainer_state={key: state[key] for key in ("num_updates", "tokenizer") if key in state} | origin,
        config=read_config(folder) | {QUANTIZATION: _section(how)},
        tokenizer_folder=tokenizer if tokenizer.is_dir() else None,
        overwrite=overwrite,
    )


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """How a checkpoint of this configuration is quantised; None: it is not.

    Raises:
        UserError: in a way that this version of ftk does not support.
    """
    section = config.get(QUANTIZATION)
    if section is None:
        return None
    try:
        how = Quantization(**section)
        problems = list(how.validate())
    except TypeError as error:
        raise UserError(
            f"config.yaml: {QUANTIZATION} is {section!r:.200}, which this version of ftk does not support"
        ) from error
    if problems:
        raise UserError(f"config.yaml: {QUANTIZATION}: {'; '.join(problems)}")
    return how


def prepare_for(config: Mapping[str, Any], model: nn.Module) -> None:
    """Replace layers of a new model by those of a quantised checkpoint's configuration."""
    how = quantization_of(config)
    if how is not None:
        prepare_quantized(model, how)


def checkpoint_metadata(folder: str | Path, how: Quantization | None = None) -> dict[str, str]:
    """Metadata for the header of a safetensors file: `model` and, if quantised, `quantization`, as JSON.

    Args:
        folder: the checkpoint they are of.
        how: how they were rounded since.
    """
    config = read_config(folder)
    metadata = {"model": json.dumps(config.get("model"))}
    section = config.get(QUANTIZATION) if how is None else _section(how)
    return metadata | ({QUANTIZATION: json.dumps(section)} if section is not None else {})


def refuse_quantized(folder: Path, what: str) -> None:
    """Raise a UserError if the checkpoint is quantised: `what` needs the weights as they were trained."""
    if read_config(folder).get(QUANTIZATION) is not None:
        raise UserError(f"{folder}: is quantised; {what} needs the checkpoint that it was made of")


def _section(how: Quantization) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(how).items() if value is not None}
