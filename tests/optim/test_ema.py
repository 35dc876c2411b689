"""The moving average of the weights: its formula, its exchange with the weights, its state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ftk.checkpoint import load_model_state, save_checkpoint
from ftk.config.options import mistakes
from ftk.optim import ema
from ftk.optim.config import EMAConfig
from ftk.optim.ema import EMA


class Tied(nn.Module):
    """An embedding tied to the output, a frozen layer, a bf16 parameter, a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.coarse = nn.Parameter(torch.randn(4).bfloat16())
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens):
        return self.output(self.frozen(self.embedding(tokens)) * self.coarse.float())


def move(model, seed):
    """As an optimizer would: another value for each trained parameter, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def bits(tensors):
    return {name: tensor.detach().clone().reshape(-1).view(torch.uint8).tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15]),
        ({"ema_decay": 0.3}, [2 / 11, 3 / 12, 0.3, 0.3, 0.3]),
        ({"ema_warmup": False}, [0.9, 0.9, 0.9, 0.9, 0.9]),
        ({"ema_warmup": False, "ema_start_update": 2}, [0, 0, 0.9, 0.9, 0.9]),
        ({"ema_start_update": 2}, [0, 0, 2 / 11, 3 / 12, 4 / 13]),
        ({"ema_warmup": False, "ema_interval": 2}, [None, 0.9, None, 0.9, None]),
    ],
)
def test_the_average_follows_its_formula(options, expected):
    model = Tied()
    ema = EMA(model, EMAConfig(**{"ema_decay": 0.9, **options}))
    slow = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    for update, decay in enumerate(expected, start=1):
        move(model, update)
        ema.update(update)
        for name, parameter in model.named_parameters():
            if decay is not None:
                slow[name] = decay * slow[name] + (1 - decay) * parameter.detach().double()
    for name, average in ema.state_dict().items():
        assert average.dtype == torch.float32
        assert torch.allclose(average.double(), slow[name], rtol=0, atol=1e-6), name


def test_only_trained_parameters_are_averaged_each_once():
    ema = EMA(Tied(), EMAConfig(ema_decay=0.9))
    assert list(ema.state_dict()) == ["coarse", "embedding.weight"]


@pytest.mark.parametrize("on", ["host", "device"])
def test_a_skipped_update_leaves_the_average_as_it_is(on, monkeypatch):
    model = Tied()
    ema = EMA(model, EMAConfig(ema_decay=0.9))
    move(model, 1)
    ema.update(1)
    before = bits(ema.state_dict())
    skip = torch.tensor(True)
    if on == "device":  # the way of accelerators, which the CPU can go too
        skip = Elsewhere(skip)
    move(model, 2)
    ema.update(2, skip)
    assert bits(ema.state_dict()) == before
    ema.update(2, ~skip)
    assert bits(ema.state_dict()) != before


class Elsewhere:
    """A tensor that says it is not on the CPU, and may not be read by the host."""

    device = torch.device("meta")

    def __init__(self, tensor):
        self.tensor = tensor

    def __invert__(self):
        return Elsewhere(~self.tensor)

    def float(self):
        return self.tensor.float()

    def __bool__(self):
        raise AssertionError("the host waits")


def test_swapping_is_exact_both_ways():
    model = Tied()
    ema = EMA(model, EMAConfig(ema_decay=0.9))
    move(model, 1)
    ema.update(1)
    move(model, 2)
    weights, averages = bits(model.state_dict()), bits(ema.state_dict())
    tokens = torch.arange(7)
    plain = model(tokens)
    with ema.swapped_in():
        assert torch.equal(model.embedding.weight, ema.state_dict()["embedding.weight"])
        assert torch.equal(model.coarse, ema.state_dict()["coarse"].bfloat16())
        assert model.output.weight is model.embedding.weight
        assert not torch.equal(model(tokens), plain)
        assert bits(ema.state_dict()) == averages
    assert bits(model.state_dict()) == weights
    assert bits(ema.state_dict()) == averages
    assert torch.equal(model(tokens), plain)


def test_an_error_inside_gives_the_weights_back():
    model = Tied()
    ema = EMA(model, EMAConfig(ema_decay=0.9))
    move(model, 1)
    weights = bits(model.state_dict())
    with pytest.raises(ZeroDivisionError), ema.swapped_in():
        raise ZeroDivisionError
    assert bits(model.state_dict()) == weights
    ema.update(1)  # and it goes on


def test_the_average_is_not_updated_from_itself():
    ema = EMA(Tied(), EMAConfig(ema_decay=0.9))
    with ema.swapped_in(), pytest.raises(AssertionError, match="average's"):
        ema.update(1)


def test_the_state_survives_a_round_trip():
    model, other = Tied(), Tied()
    ema, copied = EMA(model, EMAConfig(ema_decay=0.9)), EMA(other, EMAConfig(ema_decay=0.9))
    move(model, 1)
    ema.update(1)
    for name, average in copied.state_dict().items():  # as a checkpoint is read into it
        average.copy_(ema.state_dict()[name])
    assert bits(copied.state_dict()) == bits(ema.state_dict())
    other.load_state_dict(model.state_dict())
    for step in (2, 3):
        for each, its in ((model, ema), (other, copied)):
            move(each, step)
            its.update(step)
    assert bits(copied.state_dict()) == bits(ema.state_dict())
    assert all(copied.state_dict()[name] is not tensor for name, tensor in ema.state_dict().items())


def test_the_averages_are_a_models_weights_in_a_checkpoint(tmp_path):
    model = Tied()
    ema = EMA(model, EMAConfig(ema_decay=0.9))
    move(model, 1)
    with ema.swapped_in():
        folder = save_checkpoint(tmp_path / "averaged", model=model, trainer_state={}, config={})
    loaded = Tied()
    load_model_state(folder, loaded)
    assert torch.equal(loaded.output.weight, ema.state_dict()["embedding.weight"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ema_decay": 1.0}, "ema_decay is 1.0; it must be at least 0 and below 1"),
        ({"ema_start_update": -1}, "ema_start_update is -1; it must be at least 0"),
        ({"ema_interval": 0}, "ema_interval is 0; it must be at least 1"),
    ],
)
def test_options_out_of_range_are_named(options, error):
    assert mistakes(EMAConfig(**options)) == [error]


@pytest.mark.parametrize("at_once", [1, 30, 1 << 24])
def test_a_share_that_the_device_decides_moves_averages_as_far(at_once, monkeypatch):
    monkeypatch.setattr(ema, "_CHUNK_ELEMENTS", at_once)
    generator = torch.Generator().manual_seed(1)
    shapes = (3, 5), (), (7,), (40,), (2, 2)
    averages, weights = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
    expected = torch._foreach_lerp(averages, weights, 0.3)
    before = [average.clone() for average in averages]
    ema._lerp(averages, weights, torch.tensor(0.0))
    assert all(torch.equal(one, other) for one, other in zip(averages, before, strict=True))
    ema._lerp(averages, weights, torch.tensor(0.3))
    torch.testing.assert_close(averages, expected)
