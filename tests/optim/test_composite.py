"""Groups of parameters with an optimizer and a schedule each: which takes what, at which rate, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch

from ftk.config import compose, dump
from ftk.errors import UserError
from ftk.models import build_model
from ftk.optim.base import set_lr
from ftk.optim.composite import Composite
from ftk.optim.config import ParametersConfig
from ftk.optim.optimizers import CompositeConfig
from ftk.optim.parameter_groups import parameter_groups
from ftk.optim.schedules import GroupSchedules
from ftk.registry import LR_SCHEDULERS, OPTIMIZERS
from ftk.trainer.config import TrainConfig

GROUPS = ["layers.*.weight = muon lr=0.02 lr_scheduler=linear decay_updates=10", "*embedding = sgd lr=0.1", "* = adamw"]


@pytest.fixture(scope="module")
def model():
    return build_model("glm_tiny", num_layers=2, hidden_size=32, vocab_size=64, max_positions=16)


def composite(model, groups=GROUPS, parameters=None, **options):
    config = CompositeConfig(groups=groups, **{"lr": 1e-3, "weight_decay": 0.1, **options})
    assert list(config.validate()) == []
    return Composite(config, parameter_groups(model, config.weight_decay, parameters))


def rates(optimizer):
    return {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}


def decays(optimizer):
    return {name: group["weight_decay"] for group in optimizer.param_groups for name in group["names"]}


def test_each_parameter_belongs_to_the_first_group_that_matches(model):
    optimizer = composite(model)
    kinds = [type(member).__name__ for member in optimizer.optimizers]
    assert kinds == ["Muon", "SGD", "AdamW"]
    taken = [[name for group in member.param_groups for name in group["names"]] for member in optimizer.optimizers]
    names = [name for name, _ in model.named_parameters()]
    assert sorted(taken[0]) == sorted(n for n in names if n.startswith("layers.") and n.endswith(".weight"))
    assert sorted(taken[1]) == sorted(n for n in names if "embedding" in n)
    assert sorted(taken[2]) == sorted(n for n in names if n not in taken[0] + taken[1])
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())


def test_every_member_computes_as_it_would_alone(model):
    """A step of the whole equals a step of each member on its own parameters."""
    torch.manual_seed(0)
    optimizer = composite(model, ["*.attention = lion lr=2e-3 betas=0.8,0.95", "*norm = sgd momentum=0.5", "* = lamb"])
    parameters = dict(model.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    found = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    rules = {
        "lion": ({"lr": 2e-3, "betas": [0.8, 0.95]}, lambda name: ".attention." in name),
        "sgd": ({"lr": 1e-3, "momentum": 0.5}, lambda name: name.split(".")[-2].endswith("norm")),
        "lamb": ({"lr": 1e-3}, lambda name: ".attention." not in name and not name.split(".")[-2].endswith("norm")),
    }
    for name, parameter in parameters.items():
        [(kind, options)] = [(kind, options) for kind, (options, takes) in rules.items() if takes(name)]
        with torch.no_grad():
            parameter.copy_(start[name])
        entry = OPTIMIZERS.get(kind)
        decay = 0.1 if parameter.ndim > 1 else 0.0
        entry.target(entry.config(**options), param_groups=[{"params": [parameter], "weight_decay": decay}]).step()
        assert torch.equal(parameter, found[name]), name


def test_a_group_follows_the_run_in_proportion_or_its_own_schedule(model):
    optimizer = composite(model, parameters=ParametersConfig(lr_scales=["final_norm=0.5", "token_embedding=0.5"]))
    main = LR_SCHEDULERS.get("constant")
    schedule = GroupSchedules(main.target(main.config(), base_lr=1e-3), optimizer, total_updates=1000)
    assert rates(optimizer)["token_embedding.weight"] == pytest.approx(0.05)  # before the first update too
    for num_updates, own in ((0, 0.02), (5, 0.01), (10, 0.0)):
        set_lr(optimizer, schedule.lr(num_updates), schedule.own_lrs(num_updates))
        found = rates(optimizer)
        assert found["layers.0.attention.qkv.weight"] == pytest.approx(own)
        assert found["layers.0.attention_norm.weight"] == pytest.approx(own)  # by Muon's own AdamW
        assert found["token_embedding.weight"] == pytest.approx(0.05)
        assert found["position_embedding.block.weight"] == pytest.approx(0.1)
        assert found["layers.0.attention.qkv.bias"] == pytest.approx(1e-3)
        assert found["final_norm.weight"] == pytest.approx(5e-4)
    set_lr(optimizer, 5e-4, schedule.own_lrs(0))  # the run's schedule has come to the half
    assert rates(optimizer)["token_embedding.weight"] == pytest.approx(0.025)
    assert rates(optimizer)["layers.0.attention.qkv.weight"] == pytest.approx(0.02)


def test_an_optimizer_without_groups_of_its_own_has_the_runs_schedule_alone():
    main = LR_SCHEDULERS.get("linear").target(LR_SCHEDULERS.get("linear").config(), base_lr=1.0, total_updates=10)
    schedule = GroupSchedules(main, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), 10)
    assert (schedule.lr(5), schedule.own_lrs(5)) == (0.5, {})


def test_a_groups_decay_counts_for_what_is_decayed(model):
    found = decays(
        composite(model, ["layers.0 = adamw weight_decay=0.3", "layers.1 = adamw", "* = sgd weight-decay=0"])
    )
    assert found["layers.0.attention.qkv.weight"] == 0.3
    assert found["layers.0.attention.qkv.bias"] == 0.0
    assert found["layers.1.attention.qkv.weight"] == 0.1
    assert found["token_embedding.weight"] == 0.0


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["layers = adamw", "encoder.* = lion", "* = sgd"], "'encoder.*' matches no trained parameter; there are"),
        (["layers.0.attention.qvk = adamw", "* = sgd"], "there are for example layers.0.attention.qkv"),
        (["* = adamw", "layers = lion"], "'layers': groups before it take all that it matches"),
        (["layers = adamw"], "no group takes token_embedding.weight, position_embedding"),
    ],
)
def test_groups_that_do_not_fit_the_model_are_refused(model, groups, message):
    with pytest.raises(UserError, match=re.escape(message)):
        composite(model, groups)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("layers", "cannot be read; write 'PATTERN = OPTIMIZER option=value ...'"),
        ("= adamw", "cannot be read"),
        ("* =", "cannot be read"),
        ("* = adamw 'lr=1", "cannot be read"),
        ("* = adamwx lr=1", "unknown optimizer 'adamwx'; did you mean 'adamw'?"),
        ("* = adamw bets=0.9,0.95", "unknown option adamw: adamw.bets; did you mean adamw: adamw.betas?"),
        ("* = adamw betas=0.9", "betas is [0.9]; it must be two numbers in [0, 1)"),
        ("* = adamw lr=fast", "lr is 'fast'; it must be a finite number"),
        ("* = adamw fast", "'fast' in 'adamw fast' is no option"),
        ("* = adamw lr_scheduler=cosinus", "unknown lr_scheduler 'cosinus'; did you mean 'cosine'?"),
        ("* = adamw lr_scheduler=linear decay_updates=-1", "decay_updates is -1; it must be 0 or more"),
        ("* = composite", "composite cannot be part of itself"),
    ],
)
def test_groups_that_cannot_be_are_named(group, message):
    [error] = CompositeConfig(groups=[group]).validate()
    assert error.startswith(f"groups {group!r}: ")
    assert message in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": []}, "groups is empty"),
        ({"groups": ["* = adamw lr=1"], "lr": 0.0}, "needs a `lr` above 0"),
        ({"groups": ["* = adamw weight_decay=1"], "weight_decay": 0.0}, "needs a `weight_decay` above 0"),
    ],
)
def test_options_that_contradict_each_other_are_named(options, message):
    [error] = CompositeConfig(**options).validate()
    assert message in error


def test_flags_and_yaml_say_the_same(tmp_path):
    argv = ["data-bin", "--arch", "glm_tiny", "--max-update", "10", "--optimizer", "composite", "--lr", "3e-4"]
    flags = compose(TrainConfig, "ftk-train", "", [*argv, "--groups", *GROUPS])
    assert flags.optimizer.config.groups == GROUPS
    file = tmp_path / "run.yaml"
    lines = "".join(f"    - '{group}'\n" for group in GROUPS)
    file.write_text(f"optimizer:\n  _name: composite\n  lr: 3.0e-4\n  groups:\n{lines}")
    yaml = compose(TrainConfig, "ftk-train", "", ["--config", str(file), *argv[:5]])
    assert dump(yaml) == dump(flags)


def test_a_wrong_group_is_told_with_its_place():
    argv = ["data-bin", "--arch", "glm_tiny", "--max-update", "10", "--optimizer", "composite"]
    with pytest.raises(UserError, match=re.escape("--groups: groups '* = adamx': unknown optimizer 'adamx'")):
        compose(TrainConfig, "ftk-train", "", [*argv, "--groups", "* = adamx"])
    with pytest.raises(UserError, match="^--groups is missing: "):
        compose(TrainConfig, "ftk-train", "", argv)
