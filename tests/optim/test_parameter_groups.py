"""Which parameters are trained, decayed, slowed down: against the rule written out for each name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ftk.checkpoint.naming import optimizer_state
from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.model_parallel.shards import multiply_gradients
from ftk.models import build_model
from ftk.modules.adapters import PrefixConfig
from ftk.modules.adapters.adapt import adapt
from ftk.modules.adapters.prefix import PrefixTuning
from ftk.optim.config import ParametersConfig
from ftk.optim.parameter_groups import apply_freeze, parameter_groups, parameter_rules

LAYERS = 4


@pytest.fixture
def model():
    return build_model("glm_tiny", vocab_size=128)


def by_name(model, **options):
    """name -> (weight_decay, lr_scale) as the groups say."""
    groups = parameter_groups(model, 0.1, ParametersConfig(**options))
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in groups:
        assert group["names"] == [names[parameter] for parameter in group["params"]]
    flat = [(name, group) for group in groups for name in group["names"]]
    assert len(flat) == len({name for name, _ in flat})
    return {name: (group["weight_decay"], group["lr_scale"]) for name, group in flat}


def test_by_default_there_are_two_groups_at_the_full_rate(model):
    found = by_name(model)
    assert list(found) == sorted(found, key=lambda name: (found[name][0] == 0.0, list(found).index(name)))
    assert len(parameter_groups(model, 0.1)) == 2
    for name, parameter in model.named_parameters():
        assert found[name] == (0.1 if parameter.ndim > 1 else 0.0, 1.0)


def test_embeddings_may_be_left_undecayed(model):
    before, after = by_name(model), by_name(model, decay_embeddings=False)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        "token_embedding.weight",
        "position_embedding.position.weight",
        "position_embedding.block.weight",
    }
    assert {after[name] for name in changed} == {(0.0, 1.0)}


def test_layers_learn_slower_the_lower_they_are(model):
    found = by_name(model, layer_lr_decay=0.5)
    for name, (_, scale) in found.items():
        if "embedding" in name:
            assert scale == 0.5 ** (LAYERS + 1)
        elif name.startswith("layers."):
            assert scale == 0.5 ** (LAYERS - int(name.split(".")[1]))
        else:
            assert name.startswith("final_norm")
            assert scale == 1.0
    assert len(parameter_groups(model, 0.1, ParametersConfig(layer_lr_decay=0.5))) == 5 + 5  # no 1-D embedding


def test_the_prefix_of_a_layer_learns_as_the_layer_does(model):
    adapt(model, PrefixTuning(PrefixConfig()))
    found = by_name(model, layer_lr_decay=0.5)
    scales = [found[f"layers.{layer}.attention.prefix.embedding.weight"][1] for layer in range(LAYERS)]
    assert scales == [0.5 ** (LAYERS - layer) for layer in range(LAYERS)]


def test_small_stacks_of_a_sequential_are_no_blocks():
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 4),
            "encoder": nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])),
            "head": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        }
    )
    scales = {name: scale for name, (_, scale) in by_name(model, layer_lr_decay=0.5).items() if "weight" in name}
    assert scales == {
        "embed.weight": 0.125,
        "encoder.0.weight": 1.0,
        "encoder.1.0.weight": 0.25,
        "encoder.1.1.weight": 0.5,
        "head.0.weight": 1.0,
        "head.1.weight": 1.0,
    }


def test_a_model_without_blocks_cannot_decay_by_layer():
    with pytest.raises(UserError, match="no numbered blocks"):
        by_name(nn.Sequential(nn.Linear(2, 2)), layer_lr_decay=0.5)


def test_the_last_rule_that_matches_counts_and_multiplies_the_layers_scale(model):
    rules = ["layers=0.5", "layers.[01].*.qkv=0.25", "*.bias=2", "final_norm.weight=3"]
    found = by_name(model, lr_scales=rules, layer_lr_decay=0.5)
    plain = by_name(model, layer_lr_decay=0.5)
    for name, (_, scale) in found.items():
        factor = 1.0
        if name.startswith("layers."):
            factor = 0.5
        if ".qkv." in name and name.split(".")[1] in "01":
            factor = 0.25
        if name.endswith(".bias"):
            factor = 2.0
        if name == "final_norm.weight":
            factor = 3.0
        assert scale == factor * plain[name][1], name


def test_frozen_parameters_are_in_no_group(model):
    apply_freeze(model, ParametersConfig(freeze=["token_embedding", "layers.[0-2]", "*norm.bias"]))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {
        name
        for name, _ in model.named_parameters()
        if name.startswith(("position_embedding", "layers.3", "final_norm")) and not name.endswith("norm.bias")
    }
    assert trained == expected == set(by_name(model))


def test_tied_parameters_answer_to_each_of_their_names():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "output": nn.Linear(4, 5)})
    model["output"].weight = model["embed"].weight
    assert by_name(model, lr_scales=["output.weight=0.5"])["embed.weight"] == (0.1, 0.5)


def test_names_are_the_models_own_whatever_wraps_it(model):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self._orig_mod = model

    wrapped = Wrapper()
    wrapped._orig_mod.layers[1] = nn.ModuleDict({"_checkpoint_wrapped_module": model.layers[1]})
    groups = parameter_groups(wrapped, 0.1, ParametersConfig(layer_lr_decay=0.5, lr_scales=["layers.1=0.5"]))
    scales = {name: group["lr_scale"] for group in groups for name in group["names"]}
    assert scales["layers.1.attention.qkv.weight"] == 0.5**3 * 0.5
    assert scales["layers.2.attention.qkv.weight"] == 0.5**2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: apply_freeze(m, ParametersConfig(freeze=["layer.0.*"])),
            r"`freeze` 'layer\.0\.\*' matches no parameter; there are for example layers\.0",
        ),
        (
            lambda m: apply_freeze(m, ParametersConfig(freeze=["final_norm", "*"])),
            r"`freeze` final_norm \*: nothing is left to train",
        ),
        (
            lambda m: parameter_groups(m, 0.1, ParametersConfig(lr_scales=["tokens_embedding=0.1"])),
            "`lr_scales` 'tokens_embedding' matches no parameter; there are for example token_embedding",
        ),
        (
            lambda m: parameter_rules(m, 0.1, ParametersConfig(gradient_multipliers=["xyz=0.1"])),
            "`gradient_multipliers` 'xyz' matches no parameter; there are for example token_embedding",
        ),
    ],
)
def test_a_pattern_that_matches_nothing_is_named_with_what_is_close(model, call, message):
    with pytest.raises(UserError, match=message):
        call(model)


def test_gradients_are_multiplied_by_the_last_rule(model):
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model.final_norm.bias.grad = None
    model.layers[2].attention.qkv.weight.requires_grad_(False)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    options = ParametersConfig(gradient_multipliers=["layers=2", "layers.1=0.5", "final_norm=-1", "*.inner.bias=2"])
    multipliers = parameter_rules(model, 0.1, options).multipliers_of(model)
    assert sorted(factor for factor, _ in multipliers) == [-1.0, 0.5, 2.0]
    for factor, parameters in multipliers:
        multiply_gradients(parameters, factor)
    for name, old in before.items():
        factor = 1.0
        if name.startswith("layers."):
            factor = 0.5 if name.startswith("layers.1.") else 2.0
        if name.startswith("final_norm"):
            factor = -1.0
        if name.endswith(".inner.bias"):
            factor = 2.0
        if name == "layers.2.attention.qkv.weight":
            factor = 1.0
        assert torch.equal(model.get_parameter(name).grad, factor * old), name
    assert model.final_norm.bias.grad is None


def test_a_checkpoints_groups_hold_no_names_and_no_scales(model):
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1, ParametersConfig(layer_lr_decay=0.9)), lr=0.1)
    _, _, groups = optimizer_state(model, optimizer)
    assert all({"names", "lr_scale"}.isdisjoint(group) for group in groups)
    assert all(isinstance(name, str) for group in groups for name in group["params"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_lr_decay": 0.0}, "layer_lr_decay is 0.0; it must be above 0 and at most 1"),
        ({"layer_lr_decay": 1.1}, "layer_lr_decay is 1.1; it must be above 0 and at most 1"),
        ({"lr_scales": ["final_norm"]}, "lr_scales: 'final_norm' must be a pattern, '=' and a number"),
        ({"lr_scales": ["=2"]}, "lr_scales: '=2' must be a pattern"),
        ({"lr_scales": ["a=0"]}, "lr_scales: the factor of 'a=0' must be above 0; `freeze`"),
        ({"gradient_multipliers": ["a=inf"]}, "gradient_multipliers: 'a=inf' must be a pattern"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    [error] = mistakes(ParametersConfig(**options))
    assert error.startswith(message)
