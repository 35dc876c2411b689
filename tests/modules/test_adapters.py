"""LoRA and (IA)^3 on a layer and on a model: by formula, over float and rounded weights, merged and taken out again."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.models import build_model
from ftk.modules.adapters import IA3Config, LoRAConfig
from ftk.modules.adapters.adapt import adapt, adapted_layers, is_part, linear_layers, make_plain, merge, unmerge
from ftk.modules.adapters.ia3 import IA3, ScaledInputs, ScaledOutputs
from ftk.modules.adapters.lora import LoRA, LoRALinear
from ftk.modules.few_rows_layer import prepare
from ftk.modules.quantization import Quantization, quantize_model
from ftk.modules.quantized_linear import Int4Linear, Int8Linear

ROUNDED = {"int8": Quantization(weights="int8"), "int4": Quantization(weights="int4", group_size=32)}
WAYS = {"plain": {}, "square root": {"lora_scaling": "alpha_over_sqrt_rank"}, "decomposed": {"weight_decomposed": True}}


def small_model(arch="gpt2_tiny", **options):
    torch.manual_seed(1)
    return build_model(arch, vocab_size=96, num_layers=2, hidden_size=64, max_positions=32, **options).eval()


def adapted(model=None, learned=True, **options):
    """A model with LoRA on all layers, with numbers in place of the zeros that it starts with."""
    model = small_model() if model is None else model
    adapt(model, LoRA(LoRAConfig(**options)), seed=3)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters() if learned else ():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05, generator=generator)
        elif "magnitude" in name:
            parameter.data *= 1.0 + 0.1 * torch.rand(parameter.shape, generator=generator)
    return model


def logits(model):
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20))


class Blocks(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.blocks = nn.ModuleList([layer])


def of_layer(layer, value="", **options):
    model = Blocks(layer)
    adapt(model, LoRA(LoRAConfig(adapter_targets=[f"blocks.0{value and '='}{value}"], **options)))
    nn.init.normal_(layer.lora_B.weight)
    return layer


# -- by its formula -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("value", "options", "scale"),
    [
        ("", {"lora_rank": 4, "lora_alpha": 6.0}, 1.5),
        ("2", {"lora_alpha": 6.0}, 3.0),
        ("2/5", {}, 2.5),
        ("9", {"lora_alpha": 6.0, "lora_scaling": "alpha_over_sqrt_rank"}, 2.0),
    ],
)
def test_a_layer_adds_its_product_by_the_formula(bias, value, options, scale):
    torch.manual_seed(0)
    layer, hidden = of_layer(nn.Linear(6, 10, bias=bias), value, **options), torch.randn(3, 5, 6)
    a, b = layer.lora_A.weight, layer.lora_B.weight
    assert (a.shape[1], b.shape[0], a.shape[0]) == (6, 10, b.shape[1])
    expected = F.linear(hidden, layer.weight + scale * b @ a, layer.bias)
    torch.testing.assert_close(layer(hidden), expected)


def test_a_decomposed_layer_is_that_of_the_paper_and_its_norm_has_no_gradient():
    torch.manual_seed(0)
    layer, hidden = of_layer(nn.Linear(6, 10), "4/8", weight_decomposed=True), torch.randn(3, 6)
    torch.testing.assert_close(layer.lora_magnitude_vector.detach(), layer.weight.detach().norm(dim=1))
    layer.lora_magnitude_vector.data += 0.3
    copies = {name: value.detach().clone().requires_grad_() for name, value in layer.named_parameters()}
    changed = copies["weight"] + 2.0 * copies["lora_B.weight"] @ copies["lora_A.weight"]  # V + dV
    rows = copies["lora_magnitude_vector"][:, None] * changed / changed.detach().norm(dim=1, keepdim=True)
    expected = F.linear(hidden, rows, copies["bias"])
    found = layer(hidden)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, copies[name].grad, rtol=1e-4, atol=1e-4)


def test_the_start_is_uniform_within_one_over_the_root_of_the_inputs_and_depends_on_names_and_seed_alone():
    first, again, other = adapted(learned=False), adapted(learned=False), small_model()
    adapt(other, LoRA(LoRAConfig()), seed=4)
    a = first.layers[1].feed_forward.output.lora_A.weight
    bound = 1.0 / math.sqrt(a.size(1))
    assert 0.9 * bound < a.abs().max() <= bound
    assert a.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert torch.equal(a, again.layers[1].feed_forward.output.lora_A.weight)
    assert not torch.equal(a, other.layers[1].feed_forward.output.lora_A.weight)
    assert not torch.equal(a, first.layers[0].feed_forward.output.lora_A.weight)
    with torch.device("meta"):
        empty = build_model("gpt2_tiny", vocab_size=96, num_layers=2, hidden_size=64, max_positions=32)
        adapt(empty, LoRA(LoRAConfig()))
    name = "layers.1.feed_forward.output.lora_A.weight"
    assert torch.equal(a, empty.initial_value(name, a.shape, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_at_the_start_the_model_gives_what_it_gave_before_bit_for_bit(options, dtype):
    plain = small_model().to(dtype)
    plain.layers[0].feed_forward.output.weight.data[3] = 0.0  # as of neurons that were pruned
    expected, model = logits(plain), adapted(copy.deepcopy(plain), learned=False, **options)
    assert torch.equal(logits(model), expected)
    model(torch.arange(40).reshape(2, 20)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    merge(model)
    torch.testing.assert_close(logits(model), expected)
    assert not torch.equal(logits(adapted(plain, **options)), expected)


def test_dropout_is_on_what_the_adapter_reads_and_off_in_evaluation():
    torch.manual_seed(0)
    layer, hidden = of_layer(nn.Linear(64, 8), lora_dropout=0.5), torch.randn(2, 64)
    base = F.linear(hidden, layer.weight, layer.bias)
    layer.eval()
    assert torch.equal(layer(hidden), layer(hidden))
    layer.train()
    torch.manual_seed(1)
    found = layer(hidden)
    torch.manual_seed(1)
    read = layer.lora_dropout(hidden)
    assert ((read == 0) | torch.isclose(read, 2 * hidden)).all()
    torch.testing.assert_close(found, base + 2.0 * read @ layer.lora_A.weight.T @ layer.lora_B.weight.T)


def scaled(model, learned=True, **options):
    """A model with (IA)^3, with numbers in place of the ones that it starts with; one of them is 0."""
    adapt(model, IA3(IA3Config(**options)))
    for layer in adapted_layers(model).values() if learned else ():
        nn.init.normal_(layer.ia3_l, mean=1.0)
        layer.ia3_l.data[0] = 0.0
    return model


@pytest.mark.parametrize("kind", [nn.Linear, Int8Linear])
def test_vectors_scale_outputs_or_inputs(kind):
    torch.manual_seed(0)
    linears = [nn.Linear(32, 48), nn.Linear(32, 48)]
    layers = [linear if kind is nn.Linear else kind.of(linear) for linear in linears]
    model, hidden = nn.Module(), torch.randn(3, 32)
    model.blocks = nn.ModuleList(layers)
    scaled(model, adapter_targets=["blocks.*", "blocks.1=inputs"])
    assert (layers[0].ia3_l.shape, layers[1].ia3_l.shape) == ((48,), (32,))
    expected = (
        layers[0].ia3_l * F.linear(hidden, layers[0].weight, layers[0].bias),
        F.linear(hidden * layers[1].ia3_l, layers[1].weight, layers[1].bias),
    )
    torch.testing.assert_close((layers[0](hidden), layers[1](hidden)), expected, rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        make_plain(model)
        torch.testing.assert_close(tuple(layer(hidden) for layer in model.blocks), expected, rtol=1e-5, atol=1e-5)


def test_factors_are_one_at_the_start_and_merged_and_taken_out_bit_for_bit():
    plain = small_model("llama_tiny")
    expected = logits(plain)
    assert torch.equal(logits(scaled(copy.deepcopy(plain), learned=False)), expected)
    model = scaled(copy.deepcopy(plain))
    found = {name: type(layer).__mro__[1] for name, layer in adapted_layers(model).items()}
    layers = ("attention.qkv", ScaledOutputs), ("feed_forward.output", ScaledInputs)
    assert found == {f"layers.{block}.{name}": kind for block in (0, 1) for name, kind in layers}
    changed, before = logits(model), copy.deepcopy(model.state_dict())
    assert (changed - expected).abs().max() > 1e-2
    kept = merge(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [vars(part).keys() for part in model.modules()] == [vars(part).keys() for part in plain.modules()]
    torch.testing.assert_close(logits(model), changed, rtol=1e-5, atol=1e-5)
    unmerge(model, kept)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(model), changed)


def test_layers_of_other_names_must_be_told():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(UserError, match="has none of the layers that this adapter is usually for; name some by"):
        scaled(model)
    (message,) = mistakes(IA3Config(adapter_targets=["a=outputs"]))
    assert message.startswith("adapter_targets: a=outputs must be PATTERN or PATTERN=inputs")


# -- which layers -------------------------------------------------------------------------------------------------


def test_targets_name_layers_and_modules_and_the_last_one_counts():
    model = small_model()
    adapt(model, LoRA(LoRAConfig(adapter_targets=["layers.*.attention=4/4", "layers.1.attention.qkv=2", "*.inner"])))
    found = {name: (layer.lora_A.weight.size(0), layer.lora_scale) for name, layer in adapted_layers(model).items()}
    assert found == {
        "layers.0.attention.qkv": (4, 1.0),
        "layers.0.attention.output": (4, 1.0),
        "layers.0.feed_forward.inner": (8, 2.0),
        "layers.1.attention.qkv": (2, 8.0),
        "layers.1.attention.output": (4, 1.0),
        "layers.1.feed_forward.inner": (8, 2.0),
    }


def test_all_linear_layers_of_the_blocks_are_adapted_by_default_and_nothing_else():
    model = small_model("llama_tiny", tie_embeddings=False)
    names = [*linear_layers(model)]
    assert len(names) == 10
    assert not any("head" in name for name in names)
    adapt(model, LoRA(LoRAConfig()))
    assert [*adapted_layers(model)] == names


def test_weight_and_bias_keep_their_names_and_the_layer_its_kind():
    before, model = small_model().state_dict(), adapted()
    state = model.state_dict()
    assert {name for name in state if not is_part(name, LoRA.PARTS)} == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in before)
    layer = model.layers[0].attention.qkv
    assert isinstance(layer, nn.Linear)
    assert isinstance(layer, LoRALinear)
    assert type(layer) is type(model.layers[1].attention.qkv)  # one class, one graph for a compiler


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            small_model,
            {"adapter_targets": ["layers.*.atention.qkv"]},
            r"matches no linear layer .*; there are for example layers\.\*\.attention\.qkv, layers\.\*\.attention\.o",
        ),
        (small_model, {"adapter_targets": ["token_embedding"]}, "'token_embedding' matches no linear layer"),
        (adapted, {}, "has an adapter already"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), {}, "no linear layers in an nn.ModuleList"),
    ],
    ids=["close name", "embedding", "twice", "no list"],
)
def test_what_does_not_fit_is_refused(model, options, message):
    with pytest.raises(UserError, match=message):
        adapt(model(), LoRA(LoRAConfig(**options)))


@pytest.mark.parametrize(
    "options",
    [
        {"lora_dropout": 1.0},
        {"lora_alpha": 0.0},
        {"adapter_targets": ["a=x"]},
        {"adapter_targets": ["a=0"]},
        {"adapter_targets": ["a=4/-1"]},
        {"adapter_targets": ["=4"]},
        {"adapter_targets": ["a=4/inf"]},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options):
    (message,) = mistakes(LoRAConfig(**options))
    assert message.startswith(next(iter(options)))


# -- merging ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_merged_model_gives_the_same_and_is_a_plain_one(options, few_rows):
    plain = small_model()
    if few_rows:  # as a model is loaded for generation
        prepare(plain)
    model = adapted(copy.deepcopy(plain), **options)
    expected, before = logits(model), copy.deepcopy(model.state_dict())
    kept = merge(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [type(part) for part in model.modules()] == [type(part) for part in plain.modules()]
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    assert (logits(model) - logits(plain)).abs().max() > 1e-2
    unmerge(model, kept)
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


# -- over rounded weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads_gradient", [True, False])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_gradients_beside_rounded_weights_are_those_beside_what_they_stand_for(kind, options, reads_gradient):
    torch.manual_seed(0)
    linear = nn.Linear(64, 48)
    rounded = kind.of(linear) if kind is Int8Linear else kind.of(linear, 32)
    with torch.no_grad():
        linear.weight.copy_(rounded.weight)
    torch.manual_seed(1)
    one = of_layer(linear, **options)
    torch.manual_seed(1)
    other = of_layer(rounded, **options)
    other.load_state_dict({name: value for name, value in one.state_dict().items() if "lora" in name}, strict=False)
    inputs = [torch.randn(3, 64, generator=torch.Generator().manual_seed(2)) for _ in "ab"]
    outputs = [layer(hidden.requires_grad_(reads_gradient)) for layer, hidden in zip((one, other), inputs, strict=True)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    if reads_gradient:
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-4, atol=1e-4)
    parts = [(name, value) for name, value in other.named_parameters() if "lora" in name]
    assert len(parts) >= 2
    for name, value in parts:
        torch.testing.assert_close(value.grad, one.get_parameter(name).grad, rtol=1e-4, atol=1e-4)


def test_the_backward_pass_keeps_no_floats_of_a_rounded_weight():
    layer, kept = Int8Linear.of(nn.Linear(64, 48)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        layer(torch.randn(2, 64, requires_grad=True)).sum().backward()
    assert max(kept, default=0) < 64 * 48


@pytest.mark.parametrize("how", ROUNDED.values(), ids=ROUNDED)
def test_a_model_with_rounded_weights_is_adapted_and_becomes_a_plain_one_of_floats(how):
    rounded = small_model()
    quantize_model(rounded, how)
    expected = logits(rounded)
    model = adapted(rounded, learned=False)
    assert torch.equal(logits(model), expected)
    with pytest.raises(UserError, match="quantised weights"):
        merge(model)
    for layer in adapted_layers(model).values():
        nn.init.normal_(layer.lora_B.weight, std=0.05)
    with torch.enable_grad():  # by exact products
        expected = model(torch.arange(40).reshape(2, 20)).detach()
    make_plain(model)
    assert model.state_dict().keys() == small_model().state_dict().keys()
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_a_model_with_an_adapter_is_not_rounded():
    with pytest.raises(UserError, match="merge"):
        quantize_model(adapted(), ROUNDED["int8"])
