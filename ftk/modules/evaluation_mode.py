"""Models in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Inside, all parts of the models are in evaluation mode; afterwards each is in the mode that it had before.

    `model.train(was_training)` would give all parts the mode of the outermost, which may be another.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
