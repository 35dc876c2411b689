"""Distillation: the divergence in chunks is the plain one, and its share of the loss is the one that is asked for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ftk.batch import Batch
from ftk.criterions.base import Criterion, LossOutput
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.criterions.distillation import Distillation, DistillationConfig
from ftk.criterions.divergence import divergence
from ftk.errors import UserError

HIDDEN, WIDE, PLACES = 8, 12, 11


def layer(num_hidden: int, num_rows: int, *, bias: bool = False) -> nn.Linear:
    made = nn.Linear(num_hidden, num_rows, bias=bias)
    with torch.no_grad():
        made.weight.copy_(torch.randn(num_rows, num_hidden, generator=torch.Generator().manual_seed(num_rows)))
    return made


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1]))


def plain(logits: Tensor, teacher_logits: Tensor, temperature: float, weights: Tensor | None) -> Tensor:
    """Word for word: sum over the places of sum p (log p - log q), in float64."""
    rows = min(logits.size(1), teacher_logits.size(1))
    q, p = ((one[:, :rows].double() / temperature).softmax(-1) for one in (logits, teacher_logits))
    losses = (p * (p.log() - q.log())).sum(-1)
    return (losses if weights is None else losses * weights).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["matrix", "more than a matrix"])
@pytest.mark.parametrize(
    ("rows", "teacher_rows", "places", "weighted"),
    [(19, 19, PLACES, False), (19, 16, PLACES, True), (16, 19, PLACES, False), (19, 19, 0, False)],
)
def test_the_divergence_is_the_plain_one(rows, teacher_rows, places, weighted, bias, dtype, monkeypatch) -> None:
    monkeypatch.setattr(CrossEntropyConfig, "chunk_tokens", lambda self, device: 4)
    head, teacher = layer(HIDDEN, rows, bias=bias), layer(WIDE, teacher_rows)
    hidden, teacher_hidden = drawn(places, HIDDEN).requires_grad_(), drawn(places, WIDE)
    weights = torch.linspace(0.0, 2.0, places) if weighted else None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = divergence(head, hidden, teacher, teacher_hidden, 2.0, weights)
    wanted = plain(head(hidden), teacher(teacher_hidden).detach(), 2.0, weights)
    is_near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found.double(), wanted, **is_near)
    inputs = [hidden, *head.parameters()]
    for own, other in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(own, other, **is_near)
    assert teacher.weight.grad is None


class Model(nn.Module):
    """An embedding and an output layer."""

    def __init__(self, num_hidden: int, num_rows: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(num_rows, num_hidden), layer(num_hidden, num_rows)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


def batch_of() -> Batch:
    tokens = torch.arange(12).reshape(2, 6)
    return Batch({"tokens": tokens}, targets=torch.tensor([3, 1, 4]), places=torch.tensor([0, 5, 7]))


def test_the_loss_is_the_tasks_own_beside_the_teachers() -> None:
    torch.manual_seed(0)
    model, teacher, own = Model(HIDDEN, 13), Model(WIDE, 13), CrossEntropy(CrossEntropyConfig())
    batch, config = batch_of(), DistillationConfig(teacher="x", teacher_weight=0.3, teacher_temperature=2.0)
    found = Distillation(config, own, teacher)(model, batch)
    alone = own(model, batch)
    logits, of_teacher = (
        one.head(one.hidden_states(**batch.inputs)).flatten(0, 1)[batch.places] for one in (model, teacher)
    )
    kl = plain(logits, of_teacher, 2.0, None)
    assert float(found.loss) == pytest.approx(0.7 * float(alone.loss) + 0.3 * 4 * float(kl), rel=1e-5)
    figures = {
        name: (pytest.approx(float(total), rel=1e-5), int(count)) for name, (total, count) in found.meters.items()
    }
    own_loss = float(alone.loss)
    assert figures == {"task_loss": (own_loss, 3), "teacher_kl": (float(kl), 3), "nll_loss": (own_loss, 3)}
    smoothed = CrossEntropy(CrossEntropyConfig(label_smoothing=0.1))
    meters = Distillation(config, smoothed, teacher)(model, batch).meters
    assert float(meters["nll_loss"][0]) == pytest.approx(own_loss, rel=1e-5)
    assert float(meters["task_loss"][0]) == pytest.approx(float(smoothed(model, batch).loss), rel=1e-5)


class Scoring(CrossEntropy):
    def loss(self, head, hidden, batch) -> LossOutput:
        return super().loss(head, hidden, batch)._replace(scored=hidden)


def test_what_a_task_makes_its_figures_of_is_handed_on() -> None:
    model, batch = Model(HIDDEN, 13), batch_of()
    own = Scoring(CrossEntropyConfig())
    found = Distillation(DistillationConfig(teacher="x"), own, Model(WIDE, 13))(model, batch)
    assert torch.equal(found.scored, own(model, batch).scored)


def test_a_model_that_is_its_own_teacher_has_nothing_to_learn_of_it() -> None:
    model = Model(HIDDEN, 13)
    config = DistillationConfig(teacher="x", teacher_weight=1.0, teacher_temperature=3.0)
    found = Distillation(config, CrossEntropy(CrossEntropyConfig()), model)(model, batch_of())
    assert abs(float(found.loss)) < 1e-6
    found.loss.backward()
    assert all(parameter.grad is None or parameter.grad.abs().max() < 1e-6 for parameter in model.parameters())


class OfSeveralPasses(Criterion):
    def loss(self, head, hidden, batch) -> LossOutput:
        raise AssertionError

    def __call__(self, model, batch) -> LossOutput:
        raise AssertionError


def test_what_has_no_teacher_is_said() -> None:
    config, own = DistillationConfig(teacher="x"), CrossEntropy(CrossEntropyConfig())
    with pytest.raises(UserError, match="OfSeveralPasses .* takes the model through passes of its own"):
        Distillation(config, OfSeveralPasses(), Model(HIDDEN, 13))
    with pytest.raises(UserError, match="one number for each place, and no probabilities"):
        divergence(layer(HIDDEN, 1), drawn(3, HIDDEN), layer(HIDDEN, 1), drawn(3, HIDDEN), 1.0)
    assert own.count(batch_of()) == Distillation(config, own, Model(HIDDEN, 13)).count(batch_of()) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": ""}, "teacher is empty; it must name a folder"),
        ({"teacher_weight": 0.0}, "teacher_weight is 0.0; it must be above 0 and at most 1"),
        ({"teacher_weight": 1.5}, "teacher_weight is 1.5; it must be above 0 and at most 1"),
        ({"teacher_temperature": 0.0}, "teacher_temperature is 0.0; it must be a number above 0"),
        ({"teacher_temperature": math.nan}, "teacher_temperature is nan; it must be a number above 0"),
    ],
)
def test_an_option_out_of_range_is_named(options, message) -> None:
    assert list(DistillationConfig(**options).validate()) == [message]
