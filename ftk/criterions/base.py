"""What a criterion is given and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class LossOutput(NamedTuple):
    """A loss before the division, so that sums over batches, ranks and accumulation steps are exact.

    Attributes:
        loss: 0-d float32, sum over the target tokens, natural logarithm.
        num_targets: 0-d int64, what `loss` is to be divided by once the whole global batch is summed.
        meters: name -> (0-d sum, 0-d count), detached; the trainer sums both and logs their ratio.
    """

    loss: Tensor
    num_targets: Tensor
    meters: dict[str, tuple[Tensor, Tensor]]


class Criterion(Protocol):
    """A callable built as `Criterion(config)`; it asks nothing of the host, so that a device never waits."""

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> LossOutput:
        """The summed loss of a model on a batch as the task's collater makes it."""
