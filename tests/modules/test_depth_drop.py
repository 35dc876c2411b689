"""LayerDrop and stochastic depth: what is dropped, how often, with which gradient, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ftk.model_parallel.activation_checkpointing import checkpoint_blocks
from ftk.models import build_model
from ftk.modules.attention import CrossAttend
from ftk.modules.dropout import drop_samples
from ftk.modules.transformer_layer import (
    DecoderLayer,
    DeepNormLayer,
    ParallelLayer,
    PostNormDecoderLayer,
    PostNormLayer,
    SandwichLayer,
    TransformerLayer,
    run_layers,
)


class Plus(nn.Module):
    """Adds a parameter, so that a stack's output tells which layers ran."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, hidden, attend):
        return hidden + self.value


def test_layers_are_skipped_with_the_probability_and_have_a_gradient_of_zero() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Plus(2.0**place) for place in range(4))
    runs = 500
    ran = torch.zeros(4)
    for _ in range(runs):
        total = run_layers(layers, torch.zeros(1, 1, 1), None, 0.3)
        layers.zero_grad()
        total.sum().backward()
        gradients = torch.stack([layer.value.grad for layer in layers])  # none is None
        assert int(total) == int((gradients * 2 ** torch.arange(4)).sum())  # 1 where it ran, 0 where it did not
        ran += gradients
    assert ((ran / runs - 0.7).abs() < 5 * (0.3 * 0.7 / runs) ** 0.5).all()


def test_samples_are_dropped_whole_and_the_mean_stays() -> None:
    torch.manual_seed(0)
    values = torch.ones(20_000, 2, 3, requires_grad=True)
    dropped = drop_samples(values, 0.25)
    of_sample = dropped.detach()[:, 0, 0]
    assert torch.equal(dropped.detach(), of_sample[:, None, None].expand(-1, 2, 3))
    assert set(of_sample.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert of_sample.mean().item() == pytest.approx(1, abs=5 * (0.25 / 0.75 / 20_000) ** 0.5)
    dropped.sum().backward()
    assert torch.equal(values.grad, dropped.detach())


FORMS = (
    *(TransformerLayer, PostNormLayer, SandwichLayer, DeepNormLayer, ParallelLayer),
    *(DecoderLayer, PostNormDecoderLayer),
)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_layer_drops_all_outputs(form) -> None:
    """With nearly all dropped a layer is what it is without its parts."""

    class Part(nn.Module):
        def forward(self, hidden, *attend):
            return hidden + 5.0

    torch.manual_seed(0)
    parts = [Part() for _ in range(3 if issubclass(form, DecoderLayer) else 2)]
    layer = form(*parts, nn.Identity, 0.0, 1 - 1e-12)
    hidden, attend = torch.randn(4, 3, 2), CrossAttend(None, None, None)
    assert torch.equal(layer(hidden, attend), hidden)
    assert not torch.equal(layer.eval()(hidden, attend), hidden)


SHAPE = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "max_positions": 16, "num_layers": 4}
DROPS = {"layer_drop": 0.5, "stochastic_depth": 0.5}


def model(**options):
    torch.manual_seed(1)
    off = {"dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}
    return build_model("gpt2_tiny", **{**SHAPE, **off, **options})


def tokens() -> torch.Tensor:
    return torch.randint(50, (6, 9), generator=torch.Generator().manual_seed(2))


def test_depth_grows_linearly() -> None:
    assert [layer.stochastic_depth for layer in model(stochastic_depth=0.4).layers] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4]
    )


def test_inference_is_unchanged() -> None:
    assert torch.equal(model(**DROPS).eval()(tokens()), model()(tokens()))


@pytest.mark.parametrize("options", [{"layer_drop": 0.5}, {"stochastic_depth": 0.5}])
def test_training_drops_and_repeats_with_the_seed(options) -> None:
    trained = model(**options)
    outputs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outputs.append(trained(tokens()))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])
    assert not torch.allclose(outputs[0], model()(tokens()))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_what_is_computed_again_is_dropped_again(mode) -> None:
    found = []
    for each in ("none", mode):
        trained = model(**DROPS)
        checkpoint_blocks(trained, each)
        torch.manual_seed(5)
        trained(tokens()).square().mean().backward()
        found.append({name: parameter.grad for name, parameter in trained.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_it_compiles_to_one_graph() -> None:
    trained = model(**DROPS)
    compiled = torch.compile(trained.hidden_states, backend="aot_eager", fullgraph=True)
    torch.manual_seed(6)
    assert compiled(tokens()).isfinite().all()
