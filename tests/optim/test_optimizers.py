"""Options of optimizers and what is refused, steps that are skipped, parameter groups and clipping."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from ftk.config import compose, dump
from ftk.config.build import build
from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.model_parallel.gradients import GlobalGradients, is_non_finite
from ftk.model_parallel.world import World
from ftk.optim.base import set_lr, step_unless
from ftk.optim.parameter_groups import parameter_groups
from ftk.registry import OPTIMIZERS
from ftk.trainer.config import TrainConfig


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
        ("adamw", {"lr": -1.0}, "lr is -1.0; it must be at least 0"),
        ("adamw", {"betas": [0.9]}, "betas is [0.9]; it must be 2 numbers"),
        ("adamw", {"eps": float("nan")}, "eps is nan; it must be at least 0"),
        ("adamw", {"weight_decay": -0.1}, "weight_decay is -0.1; it must be at least 0"),
        ("sgd", {"momentum": 1.0}, "momentum is 1.0; it must be at least 0 and below 1"),
        ("sgd", {"nesterov": True}, "nesterov is true; it needs a momentum above 0"),
        ("adafactor", {"beta2_decay": 0.0}, "beta2_decay is 0.0; it must be below 0"),
        ("adafactor", {"clip_threshold": 0.0}, "clip_threshold is 0.0; it must be above 0"),
        ("muon", {"ns_steps": 0}, "ns_steps is 0; it must be at least 1"),
        ("torch.optim.RAdam", {"betas": [0.9, 1.5]}, "betas is (0.9, 1.5): Invalid beta parameter at index 1: 1.5"),
        ("torch.optim.RAdam", {"betas": [0.9]}, "betas is (0.9,): tuple index out of range"),
        (
            "torch.optim.SGD",
            {"nesterov": True},
            "nesterov is True: Nesterov momentum requires a momentum and zero dampening",
        ),
    ],
)
def test_options_out_of_range_are_named(name, options, error):
    assert mistakes(OPTIMIZERS.get(name).config(**options)) == [error]


def test_flags_of_torchs_optimizers_are_their_arguments(capsys):
    argv = ["data-bin", "--arch", "glm_tiny", "--max-update", "10", "--optimizer", "torch.optim.NAdam"]
    given = ["--lr", "1e-3", "--betas", "0.8,0.9", "--decoupled-weight-decay", "--weight-decay", "0.05"]
    config = compose(TrainConfig, "ftk-train", "", [*argv, *given])
    optimizer = config.optimizer.build(param_groups=[{"params": [nn.Parameter(torch.zeros(2, 2))]}])
    assert type(optimizer) is torch.optim.NAdam
    expected = torch.optim.NAdam([torch.zeros(1)], 1e-3, (0.8, 0.9), weight_decay=0.05, decoupled_weight_decay=True)
    assert optimizer.defaults == expected.defaults
    assert dump(build(TrainConfig, dump(config)))["optimizer"] == dump(config)["optimizer"]
    with pytest.raises(SystemExit):
        compose(TrainConfig, "ftk-train", "", [*argv, "--help", "all"])
    assert "--momentum-decay" in capsys.readouterr().out
    with pytest.raises(UserError, match="betas is 'a'; it must be a list, each item a finite number"):
        compose(TrainConfig, "ftk-train", "", [*argv, "--betas", "a"])
    with pytest.raises(UserError, match="--betas is"):
        compose(TrainConfig, "ftk-train", "", [*argv, "--betas", "0.9,2"])
    with pytest.raises(UserError, match="--momentun-decay"):
        compose(TrainConfig, "ftk-train", "", [*argv, "--momentun-decay", "1"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("composite", "optimizer 'composite' was removed; use muon"),
        ("torch.optim.RAdm", "did you mean 'torch.optim.RAdam'?"),
        ("torch.optim.lr_scheduler", "unknown optimizer"),
        ("torch.optim.Optimizer", "unknown optimizer"),
        ("torch.optim.LBFGS", "cannot be used: it computes the loss several times per step; use adamw"),
        ("torch.optim.Rprop", "cannot be used: its steps do not follow the learning rate"),
        ("torch.optim.SparseAdam", "cannot be used: it takes sparse gradients only"),
        ("torch.optim.Muon", "cannot be used: it takes matrices only; use muon"),
    ],
)
def test_what_torch_has_not_or_does_not_fit_is_refused(name, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        OPTIMIZERS.get(name)
    assert "\n" not in str(caught.value)


def test_only_what_can_be_used_is_proposed():
    with pytest.raises(UserError, match=r"torch\.optim\.RMSprop") as caught:
        OPTIMIZERS.get("torch.optim.Rprp")
    assert all(f"torch.optim.{name}" not in str(caught.value) for name in ("LBFGS", "Muon", "Rprop", "SparseAdam"))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [("RAdam", {}, 8.0), ("SGD", {}, 0.0), ("SGD", {"momentum": 0.5}, 4.0), ("AdamW", {"amsgrad": True}, 12.0)],
)
def test_the_state_of_torchs_optimizers_is_counted(name, options, expected):
    assert OPTIMIZERS.get(f"torch.optim.{name}").config(**options).state_bytes == expected
