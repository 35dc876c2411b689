"""The losses of preferences: a chosen answer is to become likelier than a rejected one, as seen from a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ftk.config.options import option
from ftk.criterions.base import Criterion, LossOutput, trunk_and_head
from ftk.criterions.config import CrossEntropyConfig
from ftk.errors import UserError
from ftk.registry import register_criterion

if TYPE_CHECKING:
    from torch import Tensor

    from ftk.batch import Batch
    from ftk.modules.heads import Head

SIGMOID, IPO, HINGE, SIMPO = LOSSES = ("sigmoid", "ipo", "hinge", "simpo")
COMPARED = (SIGMOID, IPO, HINGE)
"""The losses that need a reference model."""

_BETAS = {SIMPO: 2.0}  # as in its paper; 0.1 of the others
_FORM = CrossEntropyConfig()


@dataclass(kw_only=True)
class PreferenceLossConfig:
    preference_loss: str = option(
        SIGMOID,
        "how both answers are compared: sigmoid is DPO, hinge is SLiC; ipo: to have a margin of a given size; simpo: "
        "by likelihoods per token, without a reference",
        daily=True,
        choices=LOSSES,
    )
    beta: float | None = option(
        None,
        "a reward is this times the log-probability of an answer over that of the reference; the smaller, the further "
        "the model may go from it; default: 0.1, of simpo 2",
        "(0, inf)",
        daily=True,
    )
    simpo_margin: float = option(
        0.5,
        "target margin between the rewards of the chosen and the rejected answer",
        "[0, inf)",
        needs={"preference_loss": SIMPO},
    )
    label_smoothing: float = option(
        0.0,
        "share of pairs that are taken to be labelled the wrong way round (conservative DPO)",
        "[0, 0.5)",
        needs={"preference_loss": (SIGMOID, SIMPO)},
    )
    sft_weight: float = option(
        0.0, "weight of the mean cross entropy of the chosen answer's tokens, which is added to the loss", "[0, inf)"
    )
    reference: str | None = option(
        None,
        "the model that likelihoods are compared with: checkpoint, run or Hugging Face folder; default: that of "
        "`finetune_from`; beside a new `adapter` the model without it, which takes no memory",
        needs={"preference_loss": COMPARED},
        metavar="PATH",
    )

    @property
    def scale(self) -> float:
        """`beta`, with its default."""
        return _BETAS.get(self.preference_loss, 0.1) if self.beta is None else self.beta

    @property
    def compares(self) -> bool:
        """Whether the loss needs a reference model."""
        return self.preference_loss in COMPARED


@register_criterion("preference", config=PreferenceLossConfig, task="preference")
class Preference(Criterion):
    """A loss of the rewards of two answers, summed over pairs, with their count.

    The reward of an answer is beta times the sum of its tokens' log-probabilities, less that of the reference, if there
    is one (Rafailov et al. 2023, eq. 5); m is the reward of the chosen answer less that of the rejected one.

    - sigmoid: -(1 - e) log s(m) - e log s(-m), s the logistic function, e the label smoothing (eq. 7; Mitchell 2023).
    - ipo: (m / beta - 1 / (2 beta))², of means over the tokens (Azar et al. 2023, eq. 17).
    - hinge: max(0, 1 - m) (Zhao et al. 2023).
    - simpo: as sigmoid of m - margin, of means over the tokens, without a reference (Meng et al. 2024, eq. 6).

    A batch of P pairs has in `extras`

    - `answer` [N] int64, to which answer each target belongs: 2 p, the chosen one of pair p, or 2 p + 1, the rejected;
    - `lengths` [P, 2] float32, how many targets the answers have.

    The gradient of a pair's loss is that of the cross entropy of its tokens with weights, which are known after one
    pass over the output layer. A second one goes through the forms of the cross entropy: logits of all tokens need not
    exist at once.

    Args:
        config: which loss.

    Attributes:
        reference: frozen, in evaluation mode, whole on this process, and no part of the module that computes the loss;
            None: the model that is trained, without its adapter.
    """

    nats: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: PreferenceLossConfig) -> None:
        self.config = config
        self.reference: Any = None

    def count(self, batch: Batch) -> float:
        return len(batch.extras["lengths"])

    def __call__(self, model: Any, batch: Batch) -> LossOutput:
        """A forward pass of the reference, if there is one, and one of the model; arguments as of `Criterion`."""
        reference = self._of_reference(model, batch) if self.config.compares else None
        return self.loss(*_read(model, batch), batch, reference)

    def loss(self, head: Head, hidden: Tensor, batch: Batch, reference: Tensor | None = None) -> LossOutput:
        """The loss of a batch.

        Args:
            head, hidden, batch: as of `Criterion.loss`.
            reference: [N] float32, the cross entropy of each token by the reference model; None: there is none.

        Returns:
            Sum and count; the meters "accuracy", how often the reward of the chosen answer is the larger, "margin" (m),
            "reward_chosen", "reward_rejected"; with an `sft_weight` "nll_loss", that cross entropy.
        """
        import torch

        from ftk.criterions.loss_forms import output_loss

        config, answer, lengths = self.config, batch.extras["answer"], batch.extras["lengths"]

        def by_answer(values: Tensor) -> Tensor:
            """[N] -> sums [P, 2]"""
            return values.new_zeros(lengths.numel()).index_add(0, answer, values).view_as(lengths)

        with torch.no_grad():
            nll = output_loss(head, hidden, batch.targets, _FORM).losses  # [N]
        factors = torch.full_like(lengths, -config.scale)  # of the cross entropy of an answer's tokens in its reward
        if config.preference_loss in (IPO, SIMPO):
            factors = factors / lengths
        rewards = factors * by_answer(nll if reference is None else nll - reference)
        with torch.enable_grad():
            margins = (rewards[:, 0] - rewards[:, 1]).requires_grad_()  # [P]
            losses = self._losses(margins)
            (slopes,) = torch.autograd.grad(losses.sum(), margins)
        chosen = by_answer(nll)[:, 0] / lengths[:, 0]
        total = losses.detach().sum() + config.sft_weight * chosen.sum()
        if torch.is_grad_enabled():
            weights = factors * torch.stack((slopes, -slopes), dim=1)
            weights[:, 0] += config.sft_weight / lengths[:, 0]
            weighted = output_loss(head, hidden, batch.targets, _FORM, weights.flatten()[answer]).total
            total = total + (weighted - weighted.detach())
        found = {
            "accuracy": margins.detach() > 0,
            "margin": margins.detach(),
            "reward_chosen": rewards[:, 0],
            "reward_rejected": rewards[:, 1],
            **({"nll_loss": chosen} if config.sft_weight else {}),
        }
        count = lengths.new_full((), len(lengths))
        return LossOutput(total, count, {name: (values.sum(), count) for name, values in found.items()})

    def _losses(self, margins: Tensor) -> Tensor:
        """[P] -> [P]"""
        from torch.nn import functional as F

        config = self.config
        if config.preference_loss == IPO:
            return ((margins - 0.5) / config.scale).square()
        if config.preference_loss == HINGE:
            return F.relu(1.0 - margins)
        if config.preference_loss == SIMPO:
            margins = margins - config.simpo_margin
        smoothing = config.label_smoothing
        return -(1.0 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)

    def _of_reference(self, model: Any, batch: Batch) -> Tensor:
        """The cross entropy of each token by the reference model, [N]."""
        import torch

        from ftk.modules.adapters.adapt import is_adapted, without_adapter
        from ftk.modules.evaluation_mode import evaluation_mode

        with torch.no_grad():
            if self.reference is not None:
                return _cross_entropy(self.reference, batch)
            if not is_adapted(model):
                raise UserError(
                    f"{type(model).__name__} has no adapter, so that a reference model is needed; give the model "
                    f"that it was trained from by `reference`"
                )
            with without_adapter(model), evaluation_mode(model):
                return _cross_entropy(model, batch)


def _cross_entropy(model: Any, batch: Batch) -> Tensor:
    """Of each token, [N]."""
    from ftk.criterions.loss_forms import output_loss

    head, hidden = _read(model, batch)
    return output_loss(head, hidden, batch.targets, _FORM).losses


def _read(model: Any, batch: Batch) -> tuple[Head, Tensor]:
    """The output layer, and the hidden states [N, H] that are scored."""
    trunk, head = trunk_and_head(model)
    return head, trunk(**batch.inputs).flatten(0, 1).index_select(0, batch.places)
