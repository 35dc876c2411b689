"""What a criterion is given and what it returns."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from ftk.batch import Batch
    from ftk.modules.heads import Head


OF_RECORDS = re.compile(
    "event|subset|num_(updates|targets|batches)|epoch|lr|loss|ppl|gnorm|mfu|loss_scale|skipped_updates|unigram_loss|"
    "peak_memory_bytes|(valid_)?seconds|.*_(share|per_second)"
)
"""Names of figures that records of a run have themselves, so that no meter can be called so."""


class LossOutput(NamedTuple):
    """A loss before the division, so that sums over batches, ranks and accumulation steps are exact.

    Attributes:
        loss: 0-d float32, sum over the targets, natural logarithm.
        num_targets: 0-d, the divisor of `loss`, once both are summed over the global batch: int64, or the
            float32 sum of the targets' weights.
        meters: name -> (0-d sum, 0-d count), detached; the trainer sums both and logs their ratio. None is
            called as `OF_RECORDS` are.
        scored: [N, k], in validation alone: what `Task.figures` of a whole split is made of; None: nothing.
    """

    loss: Tensor
    num_targets: Tensor
    meters: dict[str, tuple[Tensor, Tensor]]
    scored: Tensor | None = None


class Criterion(ABC):
    """A loss, built as `Criterion(config)`; it reads no tensor on the host, so that a device never waits.

    One that takes the model through several passes, or has a model of its own, overrides `__call__`; a pipeline, whose
    stages take a batch through once, cannot train with it.

    One that compares the model with a frozen one, its reference, has options with a field `reference`, a path or None,
    and a property `compares` that is true. Its attribute `reference` becomes that model, by default the one that
    training starts from; it stays None where the reference is the model without its new adapter.
    """

    nats: ClassVar[tuple[str, ...]] = ("loss", "nll_loss")
    """Which of `loss` and the meters are negative log-likelihoods in nats, so that records show a perplexity of them;
    () for other losses. The losses of groups, `loss_<name>`, are like `loss`."""

    weighs: bool = False
    """Whether a target of weight 0 adds nothing to loss and meters, so that targets can be added to a batch. Each class
    says it itself: one that is made of another may leave the weights out."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.weighs = vars(cls).get("weighs", False)

    @classmethod
    def is_single_pass(cls) -> bool:
        """Whether it needs the hidden states of one forward pass and nothing else of the model."""
        return cls.__call__ is Criterion.__call__

    def count(self, batch: Batch) -> float:
        """What a batch adds to `num_targets`, known on the host before the batch goes to the device."""
        return len(batch.targets) if batch.weights is None else float(batch.weights.sum())

    @abstractmethod
    def loss(self, head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        """The summed loss of a batch.

        Args:
            head: the model's output layer (`ftk.modules.heads.Head`): `head(hidden)` gives the scores, [N, V].
            hidden: [N, H], the hidden states at `batch.places`. The loss has to depend on it even where N is 0, or
                the ranks that have targets wait for this one's gradients.
            batch: on the device of `hidden`.
        """

    def __call__(self, model: Any, batch: Batch) -> LossOutput:
        """One forward pass, and the loss at the batch's places.

        Args:
            model: offers `hidden_states` and `head`, or gives its scores when it is called.
            batch: on the model's device.
        """
        trunk, head = trunk_and_head(model)
        hidden = trunk(**batch.inputs)  # [B, T, H]
        return self.loss(head, hidden.flatten(0, 1).index_select(0, batch.places), batch)


class Scores:
    """The head of a model that has no head apart: what it returns are the scores."""

    weight: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden


def trunk_and_head(model: Any) -> tuple[Callable[..., Tensor], Head]:
    """What gives the hidden states [B, T, H] of a batch's inputs, and what makes scores of them."""
    if not hasattr(model, "hidden_states"):
        return model, Scores()
    return model.hidden_states, model.head
