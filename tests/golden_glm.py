"""The golden GLM (tests/golden/glm_tiny): what the original computed, and its weights in our model."""

from __future__ import annotations

import json

import numpy as np
import torch
from torch import Tensor

from ftk.models.glm import GLMConfig
from ftk.models.glm.convert import from_original
from ftk.models.glm.model import GLM
from tests.paths import ROOT

GOLDEN = ROOT / "tests" / "golden" / "glm_tiny"


def read_arrays(name: str) -> dict[str, Tensor]:
    """The arrays of a file of the golden folder, by name."""
    with np.load(GOLDEN / name) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def read_config() -> GLMConfig:
    """The shape of the golden model; it has no dropout."""
    shape = json.loads((GOLDEN / "config.json").read_text())
    return GLMConfig(
        vocab_size=shape["vocab_size"],
        num_layers=shape["num_layers"],
        hidden_size=shape["hidden_size"],
        num_attention_heads=shape["num_attention_heads"],
        max_positions=shape["max_sequence_length"],
        block_positions=shape["block_position_encoding"],
        layer_norm_eps=shape["layernorm_epsilon"],
        embedding_dropout=shape["embedding_dropout_prob"],
        attention_dropout=shape["attention_dropout_prob"],
        dropout=shape["output_dropout_prob"],
    )


def read_model() -> GLM:
    config = read_config()
    model = GLM(config)
    model.load_state_dict(from_original(read_arrays("weights.npz"), config))
    return model
