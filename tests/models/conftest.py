"""The golden GLM: the weights of the original in our model, and the arrays computed with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ftk.models.glm.config import GLMConfig
from ftk.models.glm.convert import from_original
from ftk.models.glm.model import GLM

GOLDEN = Path(__file__).parents[1] / "golden" / "glm_tiny"


def read_arrays(name: str) -> dict[str, torch.Tensor]:
    with np.load(GOLDEN / name) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def read_config() -> GLMConfig:
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


@pytest.fixture
def golden_config() -> GLMConfig:
    return read_config()


@pytest.fixture
def original_weights() -> dict[str, torch.Tensor]:
    return read_arrays("weights.npz")


@pytest.fixture
def golden_step() -> dict[str, torch.Tensor]:
    """One batch, its logits and its loss."""
    return read_arrays("step0.npz")


@pytest.fixture
def golden_gradients() -> dict[str, torch.Tensor]:
    """Gradients of that loss under the original's names."""
    return read_arrays("step0_grads.npz")


@pytest.fixture
def golden_training() -> dict[str, torch.Tensor]:
    """Two batches, and the losses and gradient norms of twenty steps on them in turn."""
    return read_arrays("train.npz")


@pytest.fixture
def original_folder() -> Path:
    """The same weights in the original's folder layout."""
    return GOLDEN / "original_checkpoint"


@pytest.fixture
def golden_model(golden_config: GLMConfig, original_weights: dict[str, torch.Tensor]) -> GLM:
    model = GLM(golden_config)
    model.load_state_dict(from_original(original_weights, golden_config))
    return model
