"""The loss of a choice among candidates, each scored by its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ftk.config.options import option
from ftk.criterions.base import Criterion, LossOutput
from ftk.registry import register_criterion

if TYPE_CHECKING:
    from torch import Tensor

    from ftk.batch import Batch
    from ftk.modules.heads import Head

LOSSES = ("cross_entropy", "generative", "mix")


@dataclass(kw_only=True)
class ChoiceCrossEntropyConfig:
    choice_loss: str = option(
        "cross_entropy",
        "cross_entropy: of the right candidate among all; generative: minus the score of the right one; "
        "mix: the sum of both",
        choices=LOSSES,
    )


@register_criterion("choice_cross_entropy", config=ChoiceCrossEntropyConfig, task="cloze")
class ChoiceCrossEntropy(Criterion):
    """Cross entropy of the right candidates among those of their question, summed, with the number of questions.

    The score of a candidate is the sum of its tokens' log-probabilities over a divisor, or the logit of its one token.
    Where several candidates are right, it is their common probability that counts.

    A batch has in `extras`, of Q questions with C candidates in all,

    - `question` [C] int64: whose candidate each is; `right` [C] bool; `answerable` [Q] float32: 1 for questions that
      have a right candidate. Others have no loss, and are right where their only candidate is not what the model would
      write;
    - `candidate` [N] int64, to which of them each target belongs, and `divisor` [C] float32; or
    - `token` [C] int64, its only token. Then there is one place for each question.

    Args:
        config: which loss.
    """

    nats: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ChoiceCrossEntropyConfig) -> None:
        self.config = config

    def count(self, batch: Batch) -> float:
        return float(batch.extras["answerable"].sum())

    def loss(self, head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        """The loss of a batch.

        Args: as of `Criterion.loss`.

        Returns:
            Sum and count; the meter "accuracy": the questions whose best candidate is right, over all.
        """
        from ftk.criterions.loss_forms import chosen_logits, target_logprobs

        extras = batch.extras
        question, right = extras["question"], extras["right"]
        if "candidate" in extras:
            logprobs, is_best = target_logprobs(head, hidden, batch.targets)
            sums = logprobs.new_zeros(len(question)).index_add(0, extras["candidate"], logprobs)  # [C]
            scores = sums / extras["divisor"]
            misses = logprobs.new_zeros(len(question)).index_add(0, extras["candidate"], (~is_best).float())
            is_greedy = misses == 0
        elif self.config.choice_loss == "cross_entropy":
            scores = chosen_logits(head, hidden, question, extras["token"])
            is_greedy = right.new_ones(len(question))
        else:
            scores, is_greedy = target_logprobs(head, hidden.index_select(0, question), extras["token"])
        return choice_output(scores, is_greedy, right, batch, self.config.choice_loss)


def choice_output(
    scores: Tensor, is_greedy: Tensor, right: Tensor, batch: Batch, choice_loss: str = "cross_entropy"
) -> LossOutput:
    """Sum and count of the losses of choices, and the meter "accuracy".

    Args:
        scores: [C] float32, of all candidates.
        is_greedy: [C] bool, whether a model would write a candidate; decides for those that are the only one.
        right: [C] bool.
        batch: with the extras question and answerable, see `ChoiceCrossEntropy`.
        choice_loss: one of `LOSSES`.
    """
    question, answerable = batch.extras["question"], batch.extras["answerable"]
    of_right = _log_sums(scores.masked_fill(~right, -float("inf")), question, len(answerable))  # [Q]
    losses = -of_right
    if choice_loss != "generative":
        choice = _log_sums(scores, question, len(answerable)) - of_right
        losses = choice if choice_loss == "cross_entropy" else choice + losses
    num_right = _num_right(scores.detach(), question, right, is_greedy, answerable)
    meters = {"accuracy": (num_right, answerable.new_full((), len(answerable)))}
    return LossOutput((losses * answerable).sum(), answerable.sum(), meters)


def _log_sums(scores: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """scores, group [C] -> [num_groups]: the logarithm of the sum of exp(score) of each group; 0 where that is none."""
    top = _group_maxima(scores.detach(), group, num_groups)
    top = top.masked_fill(top.isinf(), 0.0)
    sums = scores.new_zeros(num_groups).index_add(0, group, (scores - top[group]).exp())
    return sums.masked_fill(sums == 0, 1.0).log() + top


def _group_maxima(scores: Tensor, group: Tensor, num_groups: int) -> Tensor:
    return scores.new_full((num_groups,), -float("inf")).scatter_reduce(0, group, scores, "amax")


def _num_right(scores: Tensor, question: Tensor, right: Tensor, is_greedy: Tensor, answerable: Tensor) -> Tensor:
    """How many questions are answered rightly: 0-d.

    The first of the best candidates is chosen; an only one where the model would write it, else none.
    """
    import torch

    num_questions, numbers = len(answerable), torch.arange(len(question), device=question.device)
    is_top = scores == _group_maxima(scores, question, num_questions)[question]
    first = numbers.new_full((num_questions,), len(numbers)).scatter_reduce(
        0, question, torch.where(is_top, numbers, len(numbers)), "amin"
    )
    sizes = answerable.new_zeros(num_questions).index_add(0, question, torch.ones_like(scores))
    is_chosen = (numbers == first[question]) & (is_greedy | (sizes[question] > 1))  # [C]
    num_chosen, num_good = (
        answerable.new_zeros(num_questions).index_add(0, question, which.to(answerable.dtype))
        for which in (is_chosen, is_chosen & right)
    )
    return (num_good + (1 - num_chosen) * (1 - answerable)).sum()
