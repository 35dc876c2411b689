"""What every optimizer promises the trainer: steps skipped without a trace, exact resumes, a falling loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ftk.optim.foreach
from ftk.checkpoint import load_model_state, load_optimizer_state, save_checkpoint
from ftk.config.options import mistakes
from ftk.model_parallel.gradients import GlobalGradients, clip_factor
from ftk.model_parallel.world import World
from ftk.models import build_model
from ftk.optim.base import set_lr, step_unless
from ftk.optim.parameter_groups import parameter_groups
from ftk.registry import OPTIMIZERS

OPTIONS = {
    "adafactor": {"lr": 0.02, "beta1": 0.5, "weight_decay": 0.1},
    "adam": {"lr": 1e-3, "weight_decay": 0.01},
    "adamw": {"lr": 1e-3},
    "lamb": {"lr": 3e-2},
    "lion": {"lr": 1e-3, "weight_decay": 0.1},
    "muon": {"lr": 2e-3},
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
    "torch.optim.RAdam": {"lr": 1e-2, "betas": [0.9, 0.98], "decoupled_weight_decay": True},
    "torch.optim.RMSprop": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4},
}
"""Options of each registered optimizer, and of some of torch's: a new optimizer is a row."""


def small_model():
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "hidden_size": 32, "vocab_size": 64, "max_positions": 16}
    return build_model("glm_tiny", **sizes, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)


def build(name, model):
    entry = OPTIMIZERS.get(name)
    config = entry.config(**OPTIONS[name])
    assert mistakes(config) == []
    return entry.target(config, param_groups=parameter_groups(model, getattr(config, "weight_decay", 0.0)))


def backward(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (4, 12), generator=generator)
    positions = torch.stack([torch.arange(12), torch.zeros(12, dtype=torch.int64)]).expand(4, 2, 12)
    context = torch.full((4,), 6)
    logits = model(tokens, position_ids=positions, context_length=context)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ((tokens + 1) % 64).flatten())
    loss.backward()
    return loss.item()


def train(model, optimizer, seeds, skip=()):
    for seed in seeds:
        optimizer.zero_grad(set_to_none=True)
        backward(model, seed)
        set_lr(optimizer, OPTIONS[optimizer.ftk_name]["lr"] * (1 - seed / 100))
        if seed in skip:
            for parameter in model.parameters():
                parameter.grad.view(-1)[::3] = float("nan")
                parameter.grad.view(-1)[1::3] = float("inf")
        step_unless(optimizer, torch.tensor(seed in skip))


def both(name):
    model = small_model()
    optimizer = build(name, model)
    optimizer.ftk_name = name
    return model, optimizer


def bits(model, optimizer):
    """Parameters and optimizer state by name, as bytes."""
    tensors = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}/{entry}": value for entry, value in optimizer.state.get(parameter, {}).items()}
    return {name: tensor.detach().contiguous().reshape(-1).numpy().tobytes() for name, tensor in tensors.items()}


def assert_same_bits(model, optimizer, other_model, other_optimizer):
    left, right = bits(model, optimizer), bits(other_model, other_optimizer)
    assert left.keys() == right.keys()
    assert len(left) > len(dict(model.named_parameters()))  # there is a state to compare
    assert [name for name in left if left[name] != right[name]] == []


def test_the_table_covers_every_optimizer():
    assert {name for name in OPTIONS if "." not in name} == set(OPTIMIZERS.names())


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("decided_by", ["host", "device"])
@pytest.mark.parametrize("skipped", [0, 2])
def test_a_skipped_step_leaves_every_bit_as_it_was(name, decided_by, skipped, monkeypatch):
    if decided_by == "device":  # the way of accelerators, which the CPU can go too
        monkeypatch.setattr(ftk.optim.foreach, "_read_without_waiting", lambda tensor: False)
    model, optimizer = both(name)
    train(model, optimizer, range(skipped))
    before = bits(model, optimizer)
    train(model, optimizer, [skipped], skip=[skipped])
    after = bits(model, optimizer)
    assert [name for name in before if after[name] != before[name]] == []
    train(model, optimizer, [5, 6])

    reference, reference_optimizer = both(name)
    train(reference, reference_optimizer, range(skipped))
    train(reference, reference_optimizer, [5, 6])
    assert_same_bits(model, optimizer, reference, reference_optimizer)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_run_equals_the_uninterrupted_one(name, tmp_path):
    model, optimizer = both(name)
    train(model, optimizer, range(3))
    folder = save_checkpoint(tmp_path / "checkpoint_3", model=model, optimizer=optimizer, trainer_state={}, config={})
    train(model, optimizer, range(3, 6))

    resumed, resumed_optimizer = both(name)
    train(resumed, resumed_optimizer, [9])  # so that there is something to be overwritten
    load_model_state(folder, resumed)
    load_optimizer_state(folder, resumed, resumed_optimizer)
    train(resumed, resumed_optimizer, range(3, 6))
    assert_same_bits(resumed, resumed_optimizer, model, optimizer)


@pytest.mark.parametrize("more", [{}, {"momentum": 0.0}, {"nesterov": True}], ids=str)
def test_sgd_is_torchs_and_continues_from_its_checkpoints(more, tmp_path, monkeypatch):
    monkeypatch.setitem(OPTIONS, "sgd", OPTIONS["sgd"] | more)
    model, optimizer = both("sgd")
    theirs = small_model()
    their_optimizer = torch.optim.SGD(parameter_groups(theirs, 1e-4), lr=0.1, **{"momentum": 0.9, **more})
    their_optimizer.ftk_name = "sgd"
    train(model, optimizer, range(2))
    train(theirs, their_optimizer, range(2))
    for left, right in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(left, right)
    folder = save_checkpoint(tmp_path / "c", model=theirs, optimizer=their_optimizer, trainer_state={}, config={})
    resumed, resumed_optimizer = both("sgd")
    load_model_state(folder, resumed)
    load_optimizer_state(folder, resumed, resumed_optimizer)
    train(theirs, their_optimizer, range(2, 4))
    train(resumed, resumed_optimizer, range(2, 4))
    for left, right in zip(resumed.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", OPTIONS)
def test_torchs_own_state_dict_works_too(name):
    model, optimizer = both(name)
    train(model, optimizer, range(2))
    other, other_optimizer = both(name)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    train(other, other_optimizer, range(2, 4))
    assert_same_bits(other, other_optimizer, model, optimizer)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_loss_of_a_glm_falls(name):
    model, optimizer = both(name)
    first = backward(model, 0)
    train(model, optimizer, [0] * 15)
    assert backward(model, 0) < 0.9 * first


@pytest.mark.parametrize("name", OPTIONS)
def test_the_rate_reaches_every_parameter(name):
    """A rate of 0 moves nothing."""
    model, optimizer = both(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    backward(model, 0)
    set_lr(optimizer, 0.0)
    step_unless(optimizer, torch.tensor(False))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", ["adafactor", "lamb", "lion", "sgd"])
def test_a_large_parameter_is_updated_in_the_same_way_as_small_ones(name, monkeypatch):
    """Chunks are a matter of memory only."""
    whole, whole_optimizer = both(name)
    train(whole, whole_optimizer, range(2))
    monkeypatch.setitem(ftk.optim.foreach._CHUNK_ELEMENTS, "cpu", 100)
    chunked, chunked_optimizer = both(name)
    train(chunked, chunked_optimizer, range(2))
    for left, right in zip(whole.parameters(), chunked.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["adafactor", "adam", "adamw", "lamb", "lion", "muon", "sgd"])
def test_gradients_that_the_optimizer_clips_are_those_that_were_clipped_before(name):
    clipped, clipped_optimizer = both(name)
    plain, plain_optimizer = both(name)
    for model in (clipped, plain):
        backward(model, 0)
    gradients = GlobalGradients(clipped, clipped.parameters(), World.single())
    norm, most = gradients.norm(), 0.1
    assert norm > most
    gradients.clip(most, norm)
    step_unless(clipped_optimizer, torch.tensor(False))
    step_unless(plain_optimizer, torch.tensor(False), clip_factor(most, norm).reciprocal())
    for left, right in zip(clipped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adafactor", "lamb", "lion", "muon", "sgd"])
def test_the_scale_of_torchs_grad_scaler_is_taken_out(name):
    plain, plain_optimizer = both(name)
    scaled, scaled_optimizer = both(name)
    backward(plain, 0)
    backward(scaled, 0)
    for parameter in scaled.parameters():
        parameter.grad *= 1024.0  # exact
    plain_optimizer.step()
    scaled_optimizer.grad_scale, scaled_optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    scaled_optimizer.step()
    assert_same_bits(plain, plain_optimizer, scaled, scaled_optimizer)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_closure_is_called_with_gradients(name):
    model, optimizer = both(name)
    assert optimizer.step(lambda: backward(model, 0)) > 0.0
    assert optimizer.state
