"""Distillation: divergences in chunks are the plain ones, hidden states are compared as the formulas say, and each part
has the share of the loss that is asked for."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from ftk.batch import Batch
from ftk.config.options import mistakes
from ftk.criterions.base import Criterion, LossOutput
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.criterions.distillation import Distillation, DistillationConfig
from ftk.criterions.divergence import divergence
from ftk.errors import UserError
from ftk.modules.initialization import Normal

HIDDEN, WIDE, PLACES = 8, 12, 11


def layer(num_hidden: int, num_rows: int, *, bias: bool = False) -> nn.Linear:
    made = nn.Linear(num_hidden, num_rows, bias=bias)
    with torch.no_grad():
        made.weight.copy_(torch.randn(num_rows, num_hidden, generator=torch.Generator().manual_seed(num_rows)))
    return made


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1]))


def plain(
    logits: Tensor, teacher_logits: Tensor, temperature: float, weights: Tensor | None, most: int | None = None
) -> Tensor:
    """Word for word: sum over the places of sum p (log p - log q), in float64."""
    rows = min(logits.size(1), teacher_logits.size(1), most or 99)
    q, p = ((one[:, :rows].double() / temperature).softmax(-1) for one in (logits, teacher_logits))
    losses = (p * (p.log() - q.log())).sum(-1)
    return (losses if weights is None else losses * weights).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["matrix", "more than a matrix"])
@pytest.mark.parametrize(
    ("rows", "teacher_rows", "most", "places", "weighted"),
    [
        (19, 19, None, PLACES, False),
        (19, 16, None, PLACES, True),
        (16, 19, 30, PLACES, False),
        (19, 18, 14, PLACES, True),
        (19, 19, None, 0, False),
    ],
)
def test_the_divergence_is_the_plain_one(rows, teacher_rows, most, places, weighted, bias, dtype, monkeypatch) -> None:
    monkeypatch.setattr(CrossEntropyConfig, "chunk_tokens", lambda self, device: 4)
    head, teacher = layer(HIDDEN, rows, bias=bias), layer(WIDE, teacher_rows)
    hidden, teacher_hidden = drawn(places, HIDDEN).requires_grad_(), drawn(places, WIDE)
    weights = torch.linspace(0.0, 2.0, places) if weighted else None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = divergence(head, hidden, teacher, teacher_hidden, 2.0, weights, most)
    wanted = plain(head(hidden), teacher(teacher_hidden).detach(), 2.0, weights, most)
    is_near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found.double(), wanted, **is_near)
    inputs = [hidden, *head.parameters()]
    for own, other in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(own, other, **is_near)
    assert teacher.weight.grad is None


class Forbidding(nn.Linear):
    """Gives no probability to token 4."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).index_fill(-1, torch.tensor(4), -math.inf)


@pytest.mark.parametrize(
    "head",
    [nn.Linear(HIDDEN, 19, bias=False), nn.Linear(HIDDEN, 19), Forbidding(HIDDEN, 19)],
    ids=["matrix", "more than a matrix", "student, too"],
)
def test_what_a_teacher_forbids_adds_nothing(head) -> None:
    teacher = Forbidding(WIDE, 19)
    hidden, teacher_hidden = drawn(PLACES, HIDDEN).requires_grad_(), drawn(PLACES, WIDE)
    found = divergence(head, hidden, teacher, teacher_hidden, 2.0)
    q, p = ((layer(states).detach() / 2.0).softmax(-1) for layer, states in ((head, hidden), (teacher, teacher_hidden)))
    wanted = (p * (p / q).log()).nan_to_num(0.0).sum()
    torch.testing.assert_close(found, wanted)
    (gradient,) = torch.autograd.grad(found, [hidden])
    torch.testing.assert_close(gradient, (q - p) / 2.0 @ head.weight)


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
    assert found.loss.item() == pytest.approx(0.7 * alone.loss.item() + 0.3 * 4 * float(kl), rel=1e-5)
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


class Layered(Model):
    """An embedding and layers; a token in front of the others, which `hidden_states` leaves out."""

    def __init__(self, num_hidden: int, num_layers: int) -> None:
        super().__init__(num_hidden, 13)
        self.layers = nn.ModuleList(layer(num_hidden, num_hidden) for _ in range(num_layers))

    def states(self, tokens: Tensor) -> list[Tensor]:
        hidden = self.embedding(torch.cat([tokens[:, :1], tokens], 1))
        return [hidden := each(hidden) for each in self.layers]

    def hidden_states(self, tokens: Tensor) -> Tensor:
        return self.states(tokens)[-1][:, 1:]


@pytest.mark.parametrize("loss", ["mse", "cosine"])
@pytest.mark.parametrize(
    ("width", "own_layers", "its_layers", "given", "pairs"),
    [
        (HIDDEN, 2, 4, [], [(0, 1), (1, 3)]),
        (HIDDEN, 2, 3, [], [(0, 0), (1, 2)]),
        (WIDE, 4, 2, [], [(1, 0), (3, 1)]),
        (WIDE, 2, 4, ["1=0", "0=3", "1=3"], [(1, 0), (0, 3), (1, 3)]),
    ],
)
def test_hidden_states_are_compared_layer_by_layer(loss, width, own_layers, its_layers, given, pairs) -> None:
    torch.manual_seed(0)
    model, teacher = Layered(HIDDEN, own_layers), Layered(width, its_layers)
    options = {"teacher_hidden_weight": 0.7, "teacher_hidden_loss": loss, "teacher_layers": given}
    config, own, batch = DistillationConfig(teacher="x", **options), CrossEntropy(CrossEntropyConfig()), batch_of()
    batch = dataclasses.replace(batch, weights=torch.tensor([1.0, 0.5, 2.0]))
    assert config.layer_pairs(own_layers, its_layers) == pairs
    found = Distillation(config, own, teacher, seed=5)(model, batch)
    without = Distillation(DistillationConfig(teacher="x"), own, teacher)(model, batch)
    wanted = torch.zeros((), dtype=torch.float64)
    for mine, its in pairs:
        left, right = (
            each.states(**batch.inputs)[number][:, 1:].flatten(0, 1)[batch.places].double()
            for each, number in ((model, mine), (teacher, its))
        )
        if width != HIDDEN:
            drawn = Normal(width**-0.5)(f"teacher.layers.{its}.projection", (width, HIDDEN), 5)
            right = right @ drawn.double()
        angle = (left * right).sum(-1) / left.norm(dim=-1) / right.norm(dim=-1)
        apart = ((left - right) ** 2).sum(-1) / HIDDEN if loss == "mse" else 1 - angle
        wanted = wanted + (apart * batch.weights).sum() / len(pairs)
    assert float(found.meters["teacher_hidden"][0]) == pytest.approx(float(wanted), rel=1e-5)
    assert found.meters["teacher_hidden"][1] == without.num_targets
    assert float(found.loss) == pytest.approx(float(without.loss) + 0.7 * float(wanted), rel=1e-5)
    inputs = [*model.parameters()]
    expected = torch.autograd.grad(without.loss + 0.7 * wanted, inputs, retain_graph=True)
    for gradient, other in zip(torch.autograd.grad(found.loss, inputs), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=2e-4)
    assert not any(each._forward_hooks for each in (*model.layers, *teacher.layers))


def test_projections_keep_lengths_and_angles() -> None:
    left, right = drawn(2, 768)
    projection = Distillation(DistillationConfig(teacher="x"), CrossEntropy(CrossEntropyConfig()), Model(HIDDEN, 13))
    small = [one @ projection._projection(0, 768, torch.zeros(1, 512)) for one in (left, right)]
    for one, other in zip((left, right), small, strict=True):
        assert float(other.square().mean() / one.square().mean()) == pytest.approx(1.0, abs=0.2)
    assert abs(float(torch.cosine_similarity(*small, dim=0) - torch.cosine_similarity(left, right, dim=0))) < 0.15


class OfSeveralPasses(Criterion):
    def loss(self, head, hidden, batch) -> LossOutput:
        raise AssertionError

    def __call__(self, model, batch) -> LossOutput:
        raise AssertionError


def test_what_has_no_teacher_is_said() -> None:
    config, own = DistillationConfig(teacher="x"), CrossEntropy(CrossEntropyConfig())
    with pytest.raises(UserError, match="OfSeveralPasses .* runs more than one pass"):
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
        ({"teacher_temperature": 0.0}, "teacher_temperature is 0.0; it must be above 0"),
        ({"teacher_temperature": math.nan}, "teacher_temperature is nan; it must be above 0"),
        ({"teacher_hidden_weight": -1.0}, "teacher_hidden_weight is -1.0; it must be at least 0"),
        ({"teacher_layers": ["1=2", "1-2"]}, "teacher_layers has '1-2'; it must be two numbers of layers, as 0=1"),
    ],
)
def test_an_option_out_of_range_is_named(options, message) -> None:
    assert mistakes(DistillationConfig(**options)) == [message]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("2=0", "`teacher_layers` 2=0: the model has layers 0 to 1, no layer 2"),
        ("1=4", "`teacher_layers` 1=4: the teacher has layers 0 to 3, no layer 4"),
    ],
)
def test_a_layer_that_is_not_there_is_named(given, message) -> None:
    with pytest.raises(UserError) as caught:
        DistillationConfig(teacher="x", teacher_layers=["0=0", given]).layer_pairs(2, 4)
    assert str(caught.value) == message
