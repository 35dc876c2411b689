"""A layer that makes its input anew in the backward pass, against the layer itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftk.modules.feed_forward import FeedForward, GatedFeedForward

FORMS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "gelu": (FeedForward, {"activation": "gelu"}),
    "gelu_tanh": (FeedForward, {}),
    "no bias": (FeedForward, {"bias": False}),
    "relu": (FeedForward, {"activation": "relu"}),
    "gated": (GatedFeedForward, {}),
}
INNER = 48
HIDDEN_BYTES, INNER_BYTES = 4 * 2 * 5 * 16, 4 * 2 * 5 * INNER


def step(module: nn.Module, precision: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], int]:
    """The output and all gradients, and the bytes that are kept besides parameters."""
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hidden = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    module.zero_grad()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        output = module(hidden)
    (output.float() ** 2).sum().backward()
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    count = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    gradients = {
        name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    return {"output": output.detach(), "hidden": hidden.grad, **gradients}, count


@pytest.fixture(params=FORMS)
def name(request) -> str:
    return request.param


@pytest.fixture
def module(name) -> nn.Module:
    torch.manual_seed(1)
    form, options = FORMS[name]
    made = form(16, INNER, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def test_values_and_gradients_are_the_same_to_the_bit(module) -> None:
    found, _ = step(module)
    module.output.register_forward_hook(lambda *_: None)
    expected, _ = step(module)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_only_what_the_input_is_made_of_is_kept(module, name) -> None:
    _, kept = step(module)
    assert kept == HIDDEN_BYTES + INNER_BYTES * (2 if name == "gated" else 1)


@pytest.mark.parametrize("why", ["hook", "frozen", "another class", "bf16"])
def test_other_layers_are_called_as_they_are(why) -> None:
    class Noted(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            seen.append("class")
            return super().forward(hidden)

    seen: list[str] = []
    module = FeedForward(16, INNER)
    if why == "hook":
        module.output.register_forward_hook(lambda *_: seen.append("hook"))
    elif why == "frozen":
        module.output.requires_grad_(False)
    elif why == "another class":
        module.output.__class__ = Noted
    found, kept = step(module, torch.bfloat16 if why == "bf16" else torch.float32)
    assert all(value.isfinite().all() for value in found.values())
    assert seen == {"hook": ["hook"], "another class": ["class"]}.get(why, [])
    if why in ("hook", "another class"):
        assert kept == HIDDEN_BYTES + 2 * INNER_BYTES
