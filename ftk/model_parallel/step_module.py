"""The forward pass of a step as one module: what DDP wraps, and what is the root of FSDP2."""

from __future__ import annotations

from typing import Any

from torch import nn


class Untouched:
    """Something in a batch that wrappers are not to look into: FSDP2 moves every tensor that it finds to the GPU, and
    waits for it.

    Args:
        value: what the task finds in its place.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class StepModule(nn.Module):
    """Model, output layer and loss in one forward pass.

    Both wrappers work around the forward pass of the module that they are given: FSDP2 holds the root's parameters,
    the tied output weight among them, whole only inside of it, and DDP prepares its reduction there. A criterion that
    reads the output layer has to lie within. Parameters keep the names that they have in `model`: take them from there.

    Args:
        model: what is trained.
        task: takes the step (`ftk.tasks.Task`).
        criterion: what the task computes the loss with.
    """

    def __init__(self, model: nn.Module, task: Any, criterion: Any) -> None:
        super().__init__()
        self.model = model
        self._task = task
        self._criterion = criterion

    def forward(self, batch: dict[str, Any], training: bool) -> Any:
        """The `LossOutput` of a batch on the model's device.

        Args:
            batch: as the task's collater made it; what is `Untouched` is unpacked.
            training: whether this is a step of training or one of validation.

        Returns:
            Its loss is a sum, 0-d.
        """
        batch = {name: value.value if isinstance(value, Untouched) else value for name, value in batch.items()}
        step = self._task.train_step if training else self._task.valid_step
        return step(self.model, self._criterion, batch)
