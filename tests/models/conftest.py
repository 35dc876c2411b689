"""The golden GLM: the weights of the original in our model, and the arrays computed with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from tests.golden_glm import GOLDEN, read_arrays, read_config, read_model


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each file of the contract runs the tests of its own families (`OF_THIS_FILE`)."""
    halved = [item for item in items if hasattr(item.module, "OF_THIS_FILE")]
    others = {item for item in halved if item.callspec.params["name"] not in item.module.OF_THIS_FILE}
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


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
def golden_model() -> GLM:
    return read_model()
