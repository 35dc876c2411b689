"""How a checkpoint is quantised, as its config.yaml says; and models with the layers for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftk.checkpoint.load import read_config
from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.modules.quantization import Quantization, prepare_quantized

QUANTIZATION = "quantization"
"""The section of config.yaml that describes how a checkpoint is quantised; absent if it is not."""


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """How a checkpoint with this configuration is quantised; None if it is not.

    Raises:
        UserError: it is quantised in a way that this version of ftk does not support.
    """
    section = config.get(QUANTIZATION)
    if section is None:
        return None
    try:
        how = Quantization(**section)
        problems = mistakes(how)
    except TypeError as error:
        raise UserError(
            f"config.yaml: {QUANTIZATION} is {section!r:.200}, which this version of ftk does not support"
        ) from error
    if problems:
        raise UserError(f"config.yaml: {QUANTIZATION}: {'; '.join(problems)}")
    return how


def prepare_for(config: Mapping[str, Any], model: nn.Module) -> None:
    """Replace layers of a new model by quantised ones, if the checkpoint of this configuration is quantised."""
    how = quantization_of(config)
    if how is not None:
        prepare_quantized(model, how)


def checkpoint_metadata(folder: str | Path, how: Quantization | None = None) -> dict[str, str]:
    """Metadata for the header of a safetensors file: `model` and, if quantised, `quantization`, as JSON.

    Args:
        how: how its weights were quantised for the file; None: as in the checkpoint.
    """
    config = read_config(folder)
    metadata = {"model": json.dumps(config.get("model"))}
    section = config.get(QUANTIZATION) if how is None else section_of(how)
    return metadata | ({QUANTIZATION: json.dumps(section)} if section is not None else {})


def refuse_quantized(folder: Path, what: str) -> None:
    """Raise a UserError if the checkpoint is quantised: `what` needs the trained weights."""
    if read_config(folder).get(QUANTIZATION) is not None:
        raise UserError(f"{folder}: is quantised; {what} needs the checkpoint that it was made of")


def refuse_int8_on_a_gpu(folder: Path, device: torch.device) -> None:
    """Raise a UserError if the checkpoint's weights are int8 and the device is a GPU.

    PyTorch's kernel for CUDA is a simple one, and unpacking the weights for each product reads and writes more than
    bf16 has: a step of a small model took 1.9 times bf16's time (docs/performance.md).
    """
    how = quantization_of(read_config(folder))
    if device.type == "cuda" and how is not None and how.weights == "int8":
        raise UserError(
            f"{folder}: int8 weights generate on CPUs alone: on a GPU they are slower than bf16; "
            "give the checkpoint that it was made of, with precision bf16, or device cpu"
        )


def section_of(how: Quantization) -> dict[str, Any]:
    """The section `quantization` of config.yaml."""
    return {key: value for key, value in dataclasses.asdict(how).items() if value is not None}
