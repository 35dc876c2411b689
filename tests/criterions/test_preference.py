"""The losses of preferences against the slow way from whole log-softmaxes, and the reference they are compared with."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from ftk.batch import Batch
from ftk.config.options import mistakes
from ftk.criterions import preference
from ftk.criterions.cross_entropy import CrossEntropyConfig
from ftk.criterions.preference import LOSSES, Preference, PreferenceLossConfig
from ftk.errors import UserError
from ftk.models import build_model
from ftk.modules.adapters import IA3Config, LoRAConfig, PrefixConfig
from ftk.modules.adapters.adapt import adapt, is_part, without_adapter
from ftk.modules.adapters.ia3 import IA3
from ftk.modules.adapters.lora import LoRA
from ftk.modules.adapters.prefix import PrefixTuning
from tests.criterions.test_choice_cross_entropy import HIDDEN, VOCAB, Output
from tests.distributed import run_ranks

LENGTHS = [(2, 3), (4, 1), (1, 1), (3, 3)]
"""Tokens of the chosen and of the rejected answer of each pair."""
SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "max_positions": 16, "vocab_size": VOCAB}
OPTIONS: list[dict[str, Any]] = [
    *({"preference_loss": name} for name in LOSSES),
    {"beta": 0.7, "label_smoothing": 0.2},
    {"preference_loss": "ipo", "beta": 0.3, "sft_weight": 0.5},
    {"preference_loss": "hinge", "beta": 2.0, "sft_weight": 1.5},
    {"preference_loss": "simpo", "beta": 1.5, "simpo_margin": 0.9, "label_smoothing": 0.1},
    {"sft_weight": 1.0},
]


def batch_of(width: int = 0) -> Batch:
    """The pairs of `LENGTHS`; with a width > 0 also rows of tokens, whose last places are scored."""
    draw = torch.Generator().manual_seed(2)
    flat = [length for pair in LENGTHS for length in pair]
    answer = torch.repeat_interleave(torch.arange(len(flat)), torch.tensor(flat))
    places = torch.arange(len(answer))
    inputs = {}
    if width:
        inputs = {"tokens": torch.randint(VOCAB, (len(flat), width), generator=draw)}
        places = torch.cat([number * width + width - 1 - torch.arange(length) for number, length in enumerate(flat)])
    return Batch(
        inputs=inputs,
        targets=torch.randint(VOCAB, (len(answer),), generator=draw),
        places=places,
        extras={"answer": answer, "lengths": torch.tensor(LENGTHS, dtype=torch.float32)},
    )


def hidden_of(batch: Batch, seed: int = 3) -> Tensor:
    values = torch.randn(len(batch.places), HIDDEN, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_()


def slow(logits: Tensor, of_reference: Tensor, batch: Batch, config: PreferenceLossConfig) -> tuple[Tensor, list[Any]]:
    """Loss, and of each pair (margin, reward of the chosen answer, of the rejected one), answer by answer."""
    own, its = (values.log_softmax(-1) for values in (logits, of_reference))
    total, found = logits.sum() * 0, []
    kind, e = config.preference_loss, config.label_smoothing
    beta = config.beta or (2.0 if kind == "simpo" else 0.1)
    for pair in range(len(LENGTHS)):
        rewards, nll = [], []
        for answer in (2 * pair, 2 * pair + 1):
            places = (batch.extras["answer"] == answer).nonzero().flatten()
            logprobs, reference = (values[places, batch.targets[places]] for values in (own, its))
            ratio = logprobs.sum() if kind == "simpo" else logprobs.sum() - reference.sum()
            rewards.append(beta * (ratio / len(places) if kind in ("ipo", "simpo") else ratio))
            nll.append(-logprobs.mean())
        margin = rewards[0] - rewards[1]
        if kind == "ipo":
            loss = (margin / beta - 1 / (2 * beta)) ** 2
        elif kind == "hinge":
            loss = torch.clamp(1 - margin, min=0)
        else:
            shifted = margin - (config.simpo_margin if kind == "simpo" else 0)
            loss = -(1 - e) * torch.sigmoid(shifted).log() - e * torch.sigmoid(-shifted).log()
        total = total + loss + config.sft_weight * nll[0]
        found.append([float(value.detach()) for value in (margin, *rewards)])
    return total, found


@pytest.mark.parametrize("form", ["plain", "chunked"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_loss_meters_and_gradients_equal_the_slow_way(options: dict, form: str, monkeypatch) -> None:
    monkeypatch.setattr(preference, "_FORM", CrossEntropyConfig(loss_form=form, loss_chunk_tokens=5))
    config, batch, head = PreferenceLossConfig(**options), batch_of(), Output()
    hidden, other = hidden_of(batch), hidden_of(batch, seed=4).detach()
    reference = F.cross_entropy(head(other), batch.targets, reduction="none").detach()
    criterion = Preference(config)
    output = criterion.loss(head, hidden, batch, reference if config.compares else None)
    expected, pairs = slow(head(hidden), head(other).detach(), batch, config)
    torch.testing.assert_close(output.loss, expected)
    assert float(output.num_targets) == criterion.count(batch) == len(LENGTHS)
    margins, chosen, rejected = (sum(values) for values in zip(*pairs, strict=True))
    means = {"accuracy": sum(pair[0] > 0 for pair in pairs), "margin": margins}
    means |= {"reward_chosen": chosen, "reward_rejected": rejected}
    assert {name: float(output.meters[name][0]) for name in means} == pytest.approx(means, rel=1e-4, abs=1e-5)
    assert {float(count) for _, count in output.meters.values()} == {len(LENGTHS)}
    assert ("nll_loss" in output.meters) == (config.sft_weight > 0)
    assert not any(total.requires_grad for total, _ in output.meters.values())
    ours = torch.autograd.grad(output.loss, [hidden, head.weight])
    theirs = torch.autograd.grad(expected, [hidden, head.weight])
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(
            criterion.loss(head, hidden, batch, reference if config.compares else None).loss, expected
        )


def test_at_the_start_a_model_is_its_reference() -> None:
    model, batch = build_model("gpt2", **SHAPE).eval(), batch_of(width=8)
    criterion = Preference(PreferenceLossConfig())
    criterion.reference = copy.deepcopy(model).requires_grad_(False)
    output = criterion(model, batch)
    assert output.loss.item() == pytest.approx(len(LENGTHS) * math.log(2), abs=1e-6)
    assert {float(total) for total, _ in output.meters.values()} == {0.0}


ADAPTERS = {
    "lora": LoRA(LoRAConfig(lora_dropout=0.5)),
    "dora": LoRA(LoRAConfig(weight_decomposed=True)),
    "ia3": IA3(IA3Config()),
    "prefix": PrefixTuning(PrefixConfig(num_virtual_tokens=3)),
    "prefix_positions": PrefixTuning(PrefixConfig(num_virtual_tokens=3, prefix_positions=True)),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_model_without_its_adapter_is_the_frozen_copy_that_it_was_made_of(name: str) -> None:
    model, batch = build_model("gpt2", **SHAPE), batch_of(width=8)
    before = copy.deepcopy(model).eval().requires_grad_(False)
    adapt(model, ADAPTERS[name], seed=1)
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            parameter.requires_grad_(is_part(own, ADAPTERS[name].PARTS))
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    kinds, mode = [type(part) for part in model.modules()], [part.training for part in model.modules()]
    found = []
    for reference in (None, before):
        criterion = Preference(PreferenceLossConfig())
        criterion.reference = reference
        torch.manual_seed(7)  # of the dropout
        output = criterion(model, batch)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found.append([output.loss.detach(), *torch.autograd.grad(output.loss, parameters)])
    torch.testing.assert_close(*found)
    assert [type(part) for part in model.modules()] == kinds
    assert [part.training for part in model.modules()] == mode
    assert float(output.meters["margin"][0]) != 0


def test_an_adapter_is_on_again_after_an_error_and_must_be_there() -> None:
    model = build_model("gpt2", **SHAPE)
    with pytest.raises(UserError, match="has no adapter, .* give the model that it was trained from by `reference`"):
        Preference(PreferenceLossConfig())(model, batch_of(width=8))
    adapt(model, ADAPTERS["lora"], seed=1)
    kinds = [type(part) for part in model.modules()]
    with pytest.raises(ZeroDivisionError), without_adapter(model):
        raise ZeroDivisionError
    assert [type(part) for part in model.modules()] == kinds


def test_autocast_takes_no_weights_without_gradients_from_its_cache() -> None:
    """As PyTorch before 2.10 did (https://github.com/pytorch/pytorch/issues/158232)."""
    model, batch = build_model("gpt2", **SHAPE).eval(), batch_of(width=8)
    criterion = Preference(PreferenceLossConfig(preference_loss="simpo"))
    gradients = []
    for enabled in (False, True):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            criterion(model, batch).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, mixed in zip(*gradients, strict=True):
        torch.testing.assert_close(mixed, plain, atol=0.05 * float(plain.abs().max()), rtol=0.1)


def test_a_batch_without_loss_still_depends_on_the_hidden_states() -> None:
    empty, hidden = batch_of().without_loss(), torch.zeros(0, HIDDEN, requires_grad=True)
    for kind in LOSSES:
        criterion = Preference(PreferenceLossConfig(preference_loss=kind, sft_weight=1.0))
        output = criterion.loss(Output(), hidden, empty, torch.zeros(0))
        assert (output.loss.item(), float(output.num_targets), criterion.count(empty)) == (0.0, 0.0, 0.0)
        (gradient,) = torch.autograd.grad(output.loss, [hidden])
        assert gradient.shape == (0, HIDDEN)


def test_nothing_is_asked_of_the_host() -> None:
    """On the meta device there are no values: whatever reads one fails."""
    batch, head = batch_of().to(torch.device("meta")), Output().to("meta")
    hidden = torch.empty(len(batch.places), HIDDEN, device="meta", requires_grad=True)
    for kind in LOSSES:
        reference = torch.empty(len(batch.places), device="meta")
        Preference(PreferenceLossConfig(preference_loss=kind)).loss(head, hidden, batch, reference).loss.backward()


def of_a_shared_vocabulary() -> list[Any]:
    """Loss and gradients of this rank, whose output layer has a part of the rows."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    head, batch = Output(), batch_of()
    hidden = hidden_of(batch)
    head.weight = nn.Parameter(distribute_tensor(head.weight.data, mesh, [Shard(0)]))
    output = Preference(PreferenceLossConfig(preference_loss="simpo")).loss(head, hidden, batch)
    output.loss.backward()
    assert head.weight.grad is not None
    return [value.tolist() for value in (output.loss, hidden.grad, head.weight.grad.full_tensor())]


def test_ranks_that_share_the_vocabulary_find_the_same() -> None:
    head, batch = Output(), batch_of()
    hidden = hidden_of(batch)
    output = Preference(PreferenceLossConfig(preference_loss="simpo")).loss(head, hidden, batch)
    output.loss.backward()
    for found in run_ranks(of_a_shared_vocabulary, 2):
        expected = [output.loss.detach(), hidden.grad, head.weight.grad]
        torch.testing.assert_close([*map(torch.tensor, found)], expected, atol=1e-6, rtol=1e-5)


def test_impossible_options_are_named() -> None:
    config = PreferenceLossConfig(beta=0.0, label_smoothing=0.5, sft_weight=-1.0)
    assert [one.split(" is ")[0] for one in mistakes(config)] == ["beta", "label_smoothing", "sft_weight"]
