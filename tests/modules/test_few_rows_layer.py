"""A layer's step in one call gives what its operators give, in every form that it takes, and leaves others alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ftk.generation.engine.stepping import StepAttention
from ftk.models import build_model
from ftk.modules import _few_rows, few_rows, few_rows_layer, quantized_linear
from ftk.modules.attention import Attention, Front
from ftk.modules.feed_forward import FeedForward, GatedFeedForward
from ftk.modules.few_rows_layer import FewRowsLayer, prepare
from ftk.modules.kv_cache import KeyValueCache
from ftk.modules.norms import RMSNorm
from ftk.modules.quantization import Quantization, quantize_model
from ftk.modules.rotary import Rope, RotaryAttention
from ftk.modules.transformer_layer import TransformerLayer
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation.slow import SPECIAL

LEVEL = _few_rows.use_level(-1)
pytestmark = pytest.mark.skipif(LEVEL == 0, reason="this processor has no AVX2")

HIDDEN, HEADS, CAPACITY, LENGTH = 96, 4, 30, 27
FORMS = {
    "layer norm, GELU": ({}, FeedForward, {"activation": "gelu_tanh"}, nn.LayerNorm, None),
    "layer norm, ReLU, no bias": (
        {"bias": False, "output_bias": False}, FeedForward, {"activation": "relu", "bias": False}, nn.LayerNorm, None
    ),
    "RMS norm, gated, half rotated": (
        {"num_kv_heads": 2, "head_size": 72}, GatedFeedForward, {}, RMSNorm, Rope(1e4, 36)
    ),
    "RMS norm, gated, interleaved": (
        {"num_kv_heads": 1}, GatedFeedForward, {}, RMSNorm, Rope(1e4, 24, interleaved=True)
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, params=[1, 2], ids=["AVX2", "AVX-512"])
def level(request, monkeypatch):
    """The kernels of this set of instructions, whatever else the processor has."""
    if request.param > LEVEL:
        pytest.skip("this processor has no AVX-512")
    for module in (few_rows, few_rows_layer, quantized_linear):  # whatever other libraries have loaded
        monkeypatch.setattr(module, "max_few_rows", lambda: 8)
    _few_rows.use_level(request.param)
    yield
    _few_rows.use_level(-1)


@pytest.fixture
def runs(monkeypatch):
    """How often the kernel was run."""
    found, run = [], few_rows_layer._Step.run
    monkeypatch.setattr(few_rows_layer._Step, "run", lambda *given: found.append(1) or run(*given))
    return found


def layer_of(form, weights="fp32"):
    attention, network, options, norm, _ = FORMS[form]
    torch.manual_seed(0)
    layer = TransformerLayer(
        Attention(HIDDEN, HEADS, **attention), network(HIDDEN, 160, **options), lambda: norm(HIDDEN, eps=1e-5)
    ).eval()
    for name, parameter in layer.named_parameters():
        nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.1)
    model = nn.ModuleList([layer])
    holder = nn.Module()
    holder.layers = model
    if weights.startswith("int"):
        quantize_model(holder, Quantization(weights=weights, group_size=32 if weights == "int4" else None))
    return holder.to(torch.bfloat16) if weights == "bf16" else holder


def step_of(holder, form, num_rows=2, width=1, masked=False, front=None):
    """hidden [R, W, H] and an attend; both anew, the same in each call."""
    generator = torch.Generator().manual_seed(1)
    dtype = holder.layers[0].attention_norm.weight.dtype
    shape = holder.layers[0].attention.key_shape
    cache = KeyValueCache(num_rows + 1, CAPACITY, torch.empty(shape, dtype=dtype))
    for buffer in cache._written():
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    slots = torch.arange(num_rows)[:, None] * 0 + LENGTH - width + torch.arange(width)
    mask = None
    if masked:
        mask = torch.zeros(num_rows, 1, width, CAPACITY, dtype=dtype)
        mask[..., 3:9] = float("-inf")
        mask = mask[..., :LENGTH]
    attend = StepAttention(cache, cache.step_index(slots), mask, LENGTH, front)
    if (rope := FORMS[form][4]) is not None:
        positions = torch.arange(num_rows)[:, None] * 5 + 20 + torch.arange(width)
        attend = RotaryAttention(attend, *rope.tables(positions), rope.interleaved)
    return torch.randn(num_rows, width, HIDDEN, generator=generator).to(dtype), attend


def caches(attend):
    return getattr(attend, "attend", attend).cache._written()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(("num_rows", "width", "masked"), [(1, 1, False), (3, 1, True), (2, 4, True), (37, 1, True)])
@torch.inference_mode()
def test_it_is_the_layer(form, weights, num_rows, width, masked, runs):
    holder = layer_of(form, weights)
    own = copy.deepcopy(holder)
    prepare(own)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        given, wanted_attend = step_of(holder, form, num_rows, width, masked)
        wanted = holder.layers[0](given, wanted_attend)
        hidden, attend = step_of(holder, form, num_rows, width, masked)
        before = hidden.clone()
        found = own.layers[0](hidden, attend)
        torch.set_num_threads(1)
        # The operators multiply rounded weights and many rows in bfloat16.
        off = 0.03 if weights == "bf16" or (weights != "fp32" and num_rows > 8) else 2e-5
        torch.testing.assert_close(found, wanted, rtol=off, atol=off)
        assert torch.equal(hidden, before)
        for mine, theirs in zip(caches(attend), caches(wanted_attend), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=off, atol=off)
    assert len(runs) == 2


@torch.inference_mode()
def test_a_row_gives_the_same_bits_alone_and_among_others():
    form = "RMS norm, gated, half rotated"
    holder = layer_of(form)
    prepare(holder)
    layer, (hidden, attend) = holder.layers[0], step_of(holder, form, 7, 1)
    together = layer(hidden, attend)
    for row in range(7):
        hidden, attend = step_of(holder, form, 7, 1)
        inner = attend.attend
        cache = KeyValueCache(1, CAPACITY, inner.cache._written()[0][0, :, 0])
        for mine, theirs in zip(cache._written(), inner.cache._written(), strict=True):
            mine.copy_(theirs[row : row + 1])
        places = cache.step_index(torch.full((1, 1), LENGTH - 1))
        alone = attend._replace(
            attend=StepAttention(cache, places, None, LENGTH),
            cos=attend.cos[row : row + 1],
            sin=attend.sin[row : row + 1],
        )
        assert torch.equal(layer(hidden[row : row + 1], alone)[0], together[row])


@torch.inference_mode()
def test_what_is_loaded_moved_or_cast_later_is_seen(runs):
    form = "layer norm, GELU"
    holder, other = layer_of(form), layer_of(form)
    prepare(holder)
    for parameter in other.parameters():
        parameter.mul_(1.5)
    holder.layers[0](*step_of(holder, form))
    holder.load_state_dict(other.state_dict())
    torch.testing.assert_close(holder.layers[0](*step_of(holder, form)), other.layers[0](*step_of(other, form)))
    holder.to(torch.bfloat16), other.to(torch.bfloat16)
    found, wanted = (each.layers[0](*step_of(each, form)) for each in (holder, other))
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.1)
    assert len(runs) == 3


def strange():
    """Name -> what makes a prepared layer or its call one that the kernel must leave alone."""
    front = Front(torch.randn(1, HEADS, 2, 24), torch.randn(1, HEADS, 2, 24))
    return {
        "a hook": (lambda layer: layer.attention.qkv.register_forward_hook(lambda *given: None), {}),
        "another activation": (lambda layer: setattr(layer.feed_forward, "activation", torch.tanh), {}),
        "another linear layer": (lambda layer: setattr(layer.attention, "output", torch.nn.Bilinear(1, 1, 1)), {}),
        "a front": (lambda layer: None, {"front": front}),
        "many rows": (lambda layer: None, {"num_rows": 65}),
        "training": (lambda layer: layer.train(), {}),
    }


@pytest.mark.parametrize(("num_rows", "taken"), [(32, 1), (33, 0)])
@torch.no_grad()
def test_more_rows_are_taken_of_small_layers_alone(num_rows, taken, runs, monkeypatch):
    form = "layer norm, GELU"
    holder = layer_of(form)
    prepare(holder)
    monkeypatch.setattr(few_rows_layer, "_MAX_PRODUCTS", 1000)
    holder.layers[0](*step_of(holder, form, num_rows))
    assert len(runs) == taken


@pytest.mark.parametrize("name", strange())
@torch.no_grad()
def test_what_is_no_such_step_goes_operator_by_operator(name, runs):
    form, (change, options) = "layer norm, GELU", strange()[name]
    holder = layer_of(form)
    prepare(holder)
    layer = holder.layers[0]
    assert type(layer) is FewRowsLayer
    layer(*step_of(holder, form))
    assert len(runs) == 1
    change(layer)
    try:
        found = layer(*step_of(holder, form, **options))
    except TypeError:
        assert name == "another linear layer"  # a bilinear one wants two inputs: it was asked
    else:
        layer.__class__ = TransformerLayer
        torch.testing.assert_close(found, layer(*step_of(holder, form, **options)))
    assert len(runs) == 1


def test_with_gradients_it_goes_operator_by_operator(runs):
    form = "layer norm, GELU"
    holder = layer_of(form)
    prepare(holder)
    hidden, attend = step_of(holder, form)
    holder.layers[0](hidden, attend).sum().backward()
    assert holder.layers[0].attention.output.weight.grad is not None
    assert not runs


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@torch.inference_mode()
def test_what_is_not_finite_stays_so_and_in_its_row(value):
    form = "layer norm, GELU"
    holder = layer_of(form)
    prepare(holder)
    hidden, attend = step_of(holder, form, 3)
    hidden[1, 0, 5] = value
    found = holder.layers[0](hidden, attend)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()


def test_a_prompt_of_few_tokens_is_read_operator_by_operator(runs):
    model = build_model(
        "glm", vocab_size=64, num_layers=2, hidden_size=64, num_attention_heads=4, max_positions=32
    ).eval()
    wanted = BlankGenerator(model, SPECIAL, max_len=5, min_len=5).fill_ids([[9, 3, 8]])
    assert not runs
    prepare(model)
    found = BlankGenerator(model, SPECIAL, max_len=5, min_len=5).fill_ids([[9, 3, 8]])
    assert found[0][0].tokens == wanted[0][0].tokens
    assert len(runs) == 2 * 4  # layers, and tokens behind the first
