"""Optimizers against the formula of their paper, skipped steps, parameter groups and clipping."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ftk.model_parallel.gradients import GlobalGradients, is_non_finite
from ftk.model_parallel.world import World
from ftk.optim.base import set_lr, step_unless
from ftk.optim.parameter_groups import parameter_groups
from ftk.registry import OPTIMIZERS


def test_adamw_follows_its_formula():
    weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = build("adamw", [weight], lr=0.01, betas=[0.9, 0.98], eps=1e-6, weight_decay=0.1)
    expected, first, second = weight.detach().clone(), torch.zeros(5, 3), torch.zeros(5, 3)
    for step in range(1, 6):
        weight.grad = torch.randn(5, 3, dtype=torch.float64)
        first = 0.9 * first + 0.1 * weight.grad
        second = 0.98 * second + 0.02 * weight.grad**2
        expected -= 0.01 * 0.1 * expected
        expected -= 0.01 * (first / (1 - 0.9**step)) / ((second / (1 - 0.98**step)).sqrt() + 1e-6)
        optimizer.step()
    assert torch.allclose(weight, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_follows_its_formula(nesterov):
    weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = build("sgd", [weight], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    expected, velocity = weight.detach().clone(), torch.zeros(5, 3)
    for _ in range(5):
        weight.grad = torch.randn(5, 3, dtype=torch.float64)
        gradient = weight.grad + 0.01 * expected
        velocity = 0.9 * velocity + gradient
        expected -= 0.1 * (gradient + 0.9 * velocity if nesterov else velocity)
        optimizer.step()
    assert torch.allclose(weight, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("skipped_step", [0, 2])
def test_a_skipped_step_leaves_no_trace(name, skipped_step):
    options = {"momentum": 0.9} if name == "sgd" else {}
    weight = nn.Parameter(torch.randn(7))
    other = nn.Parameter(weight.detach().clone())
    optimizer, reference = build(name, [weight], lr=0.1, **options), build(name, [other], lr=0.1, **options)
    for step in range(4):
        gradient = torch.randn(7)
        if step == skipped_step:
            weight.grad = torch.full((7,), float("nan"))
            step_unless(optimizer, torch.tensor(True))
        weight.grad, other.grad = gradient.clone(), gradient.clone()
        step_unless(optimizer, torch.tensor(False))
        reference.step()
    assert torch.equal(weight, other)
    for key, value in reference.state[other].items():
        assert torch.equal(optimizer.state[weight][key], value)


def test_an_optimizer_that_knows_nothing_of_skipping_is_not_called():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.RMSprop([weight], lr=0.1)
    weight.grad = torch.full((3,), float("inf"))
    step_unless(optimizer, torch.tensor(True))
    assert torch.equal(weight, torch.ones(3))
    assert not optimizer.state[weight]
    weight.grad = torch.ones(3)
    step_unless(optimizer, torch.tensor(False))
    assert (weight < 1).all()


def test_no_decay_on_biases_and_norms_and_tied_weights_once():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 10, bias=False))
    model[3].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight)]
    expected = (model[1].bias, model[2].weight, model[2].bias)
    assert [id(p) for p in plain["params"]] == [id(p) for p in expected]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_a_groups_own_decay_wins_over_the_configs():
    model = nn.Linear(2, 2)
    optimizer = OPTIMIZERS.get("adamw").target(
        OPTIMIZERS.get("adamw").config(lr=0.1, weight_decay=0.5), param_groups=parameter_groups(model, 0.5)
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]


def test_each_group_has_its_own_share_of_the_learning_rate():
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr_scale": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]


@pytest.mark.parametrize("max_norm", [0.5, 100.0, 0.0])
def test_clipping_scales_to_the_norm_and_only_down(max_norm):
    model = nn.Linear(4, 3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    gradients = GlobalGradients(model, model.parameters(), World.single())
    norm = gradients.norm()
    whole = torch.cat([g.flatten() for g in before.values()])
    assert norm.item() == pytest.approx(whole.norm().item(), rel=1e-6)
    gradients.clip(max_norm, norm)
    scale = 0.5 / (norm.item() + 1e-6) if max_norm == 0.5 else 1.0
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, before[name] * scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 2.0], False), ([1.0, float("nan")], True), ([float("-inf"), 1.0], True), ([3e38, 3e38], False)],
)
def test_non_finite_values_are_found(values, expected):
    found = is_non_finite(*(torch.tensor(v, requires_grad=True) for v in values))
    assert found.dtype == torch.bool
    assert found.ndim == 0
    assert bool(found) is expected


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("adamw", {"lr": -1.0}, "lr is -1.0; it must be 0 or more"),
        ("adamw", {"betas": [0.9]}, "betas is [0.9]; it must be two numbers in [0, 1)"),
        ("adamw", {"eps": float("nan")}, "eps is nan; it must be 0 or more"),
        ("adamw", {"weight_decay": -0.1}, "weight_decay is -0.1; it must be 0 or more"),
        ("sgd", {"momentum": 1.0}, "momentum is 1.0; it must be in [0, 1)"),
        ("sgd", {"nesterov": True}, "nesterov is true; it needs a momentum above 0"),
    ],
)
def test_options_out_of_range_are_named(name, options, error):
    assert list(OPTIMIZERS.get(name).config(**options).validate()) == [error]


def test_optimizer_state_survives_a_copy():
    weight = nn.Parameter(torch.randn(4))
    optimizer = build("adamw", [weight], lr=0.1)
    weight.grad = torch.randn(4)
    optimizer.step()
    other = nn.Parameter(weight.detach().clone())
    copied = build("adamw", [other], lr=0.1)
    copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    weight.grad = torch.randn(4)
    other.grad = weight.grad.clone()
    optimizer.step()
    copied.step()
    assert torch.equal(weight, other)


def build(name, parameters, **options):
    entry = OPTIMIZERS.get(name)
    return entry.target(entry.config(**options), param_groups=[{"params": parameters}])
