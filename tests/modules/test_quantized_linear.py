"""Quantised layers: the packed kernels against the weights they stand for, and the rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ftk.errors import UserError
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from ftk.modules import quantized_linear
from ftk.modules._few_rows import use_level
from ftk.modules.embeddings import TiedEmbedding
from ftk.modules.quantization import Quantization, prepare_quantized, quantize_model
from ftk.modules.quantized_linear import (
    PACKED_MAX_ROWS,
    Int4Linear,
    Int8Linear,
    Int8TiedEmbedding,
    has_packed_kernel,
    int4_rounded,
    int8_rounded,
    unpacked_int4,
)
from tests.processes import forked

BFLOAT16_ERROR = 0.006  # of a product whose inputs and result are rounded to 8 bits


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def linear(num_inputs: int = 128, num_outputs: int = 96, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(num_inputs, num_outputs, bias=bias)


def quantized(kind: str, layer: nn.Linear) -> Int8Linear | Int4Linear:
    return Int8Linear.of(layer) if kind == "int8" else Int4Linear.of(layer, int(kind.split("/")[1]))


@pytest.mark.parametrize("kind", ["int8", "int4/32", "int4/64", "int4/128"])
@pytest.mark.parametrize("rows", [1, 3, PACKED_MAX_ROWS, PACKED_MAX_ROWS + 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("own", [True, False])
@torch.no_grad()
def test_product_is_that_of_the_weights_they_stand_for(kind, rows, bias, own, monkeypatch):
    if not own:
        monkeypatch.setattr(quantized_linear, "max_few_rows", lambda: 0)
    original = linear(bias=bias)
    layer = quantized(kind, original)
    hidden = torch.randn(2, rows, 128)[:1]  # [1, T, I]
    wanted = nn.functional.linear(hidden, layer.weight, original.bias)
    found = layer(hidden)
    assert (found.shape, found.dtype) == (wanted.shape, torch.float32)
    assert relative_error(found, wanted) < BFLOAT16_ERROR


@pytest.mark.skipif(use_level(-1) == 0, reason="this processor has no AVX2")
@pytest.mark.parametrize("kind", ["int8", "int4/32"])
@torch.no_grad()
def test_our_kernel_does_not_round_what_it_reads(kind, monkeypatch):
    monkeypatch.setattr(quantized_linear, "max_few_rows", lambda: 8)
    original = linear()
    layer, hidden = quantized(kind, original), torch.randn(2, 3, 128)
    wanted = nn.functional.linear(hidden, layer.weight, original.bias)
    torch.testing.assert_close(layer(hidden), wanted, rtol=1e-5, atol=1e-5)
    found = layer.to(torch.bfloat16)(hidden.bfloat16())
    assert found.dtype == torch.bfloat16
    assert relative_error(found.float(), wanted) < BFLOAT16_ERROR


@pytest.mark.parametrize("kind", ["int8", "int4/32"])
@torch.no_grad()
def test_without_packed_kernels_the_product_is_the_same(kind, monkeypatch):
    layer = quantized(kind, linear())
    hidden = torch.randn(2, 128)
    monkeypatch.setattr(quantized_linear, "max_few_rows", lambda: 0)
    fast = layer(hidden)
    monkeypatch.setattr(quantized_linear, "has_packed_kernel", lambda kind, device: False)
    monkeypatch.setattr(quantized_linear, "_has_fast_bfloat16", lambda device: False)
    slow = layer(hidden)
    assert relative_error(fast, slow) < BFLOAT16_ERROR
    wanted = nn.functional.linear(hidden, layer.weight, layer.bias)
    torch.testing.assert_close(slow, wanted, rtol=1e-5, atol=1e-5)


def test_int8_of_any_number_of_inputs_reads_no_further_than_a_row():
    process = forked(_products_without_our_kernel, 172)  # it would end by a segmentation fault, or with NaN or infinity
    process.start()
    process.join(60)
    assert process.exitcode == 0


@torch.inference_mode()
def _products_without_our_kernel(num_inputs: int) -> None:
    quantized_linear.max_few_rows = lambda: 0  # type: ignore[assignment]
    layer, hidden = Int8Linear.of(linear(num_inputs, 64, bias=False)), torch.randn(2, num_inputs).half()
    for _ in range(200):
        assert relative_error(layer(hidden).float(), hidden.float() @ layer.weight.T) < BFLOAT16_ERROR


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_packed_kernels_are_there_on_this_cpu(kind):
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("PyTorch promises them for x86 with AVX2 and later")
    assert has_packed_kernel(kind, "cpu")


def test_a_kernel_that_is_missing_or_wrong_is_not_used(monkeypatch):
    has_packed_kernel.cache_clear()
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    assert not has_packed_kernel("int8", "cpu")
    has_packed_kernel.cache_clear()
    monkeypatch.setattr(torch, "_weight_int8pack_mm", lambda hidden, weight, scale: hidden @ weight.bfloat16().T, False)
    assert not has_packed_kernel("int8", "cpu")  # it forgot the scale
    has_packed_kernel.cache_clear()


def test_int8_is_off_by_half_a_step_at_most():
    weight = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    weight[7] = 0.0
    values, scale = int8_rounded(weight)
    off = (values.float() * scale.float()[:, None] - weight).abs() / scale.float()[:, None]
    # bfloat16 may round a row's scale down by 2^-9, so that its largest value, 127 steps, is clipped by a quarter.
    assert off.max() <= 0.51
    assert values.abs().max() <= 127
    assert not values[7].any()


def test_int4_error_is_below_that_of_plain_rounding():
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    packed, scales = int4_rounded(weight, 32)
    assert (packed.shape, packed.dtype, scales.shape) == ((64, 64), torch.uint8, (4, 64, 2))
    layer = Int4Linear(128, 64, bias=False)
    layer.quantized_weight, layer.scale_and_offset = packed, scales
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (high - low) / 15
    plain = (((groups - low) / step).round() * step + low).flatten(1)
    assert (layer.weight - weight).square().sum() < 0.99 * (plain - weight).square().sum()


def test_int4_of_constant_and_zero_groups():
    weight = torch.zeros(16, 64)
    weight[:, 32:] = 0.5
    layer = Int4Linear.of(_with_weight(weight), 32)
    torch.testing.assert_close(layer.weight, weight, rtol=0.01, atol=1e-6)
    assert torch.isfinite(layer.weight).all()


def _with_weight(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.size(1), weight.size(0), bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


def test_two_int4_values_lie_in_a_byte_the_even_one_high():
    assert unpacked_int4(torch.tensor([[0x1F, 0xA0]], dtype=torch.uint8)).tolist() == [[1, 15, 10, 0]]


@torch.no_grad()
def test_int4_reads_weights_that_are_loaded_after_its_first_use():
    one, other = Int4Linear.of(linear(), 32), Int4Linear.of(nn.Linear(128, 96), 32)
    hidden = torch.randn(1, 128)
    one(hidden)
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(hidden), other(hidden))


def test_int4_group_must_divide_the_inputs():
    with pytest.raises(UserError, match="groups of 64 inputs, but a layer has 96"):
        Int4Linear.of(linear(96, 16), 64)


@torch.no_grad()
def test_tied_embedding_looks_up_and_scores_by_the_same_rows():
    embedding = TiedEmbedding(48, 64)
    layer = Int8TiedEmbedding.of(embedding)
    tokens = torch.tensor([[0, 47], [5, 5]])
    assert torch.equal(layer(tokens), layer.weight[tokens])
    assert relative_error(layer.weight, embedding.weight) < 0.01
    hidden = torch.randn(3, 64)
    assert relative_error(layer.logits(hidden), hidden @ layer.weight.T) < BFLOAT16_ERROR
    assert layer.to(torch.bfloat16)(tokens).dtype == torch.bfloat16


def small_glm() -> GLM:
    return GLM(
        GLMConfig(vocab_size=96, num_layers=2, hidden_size=64, num_attention_heads=4, max_positions=32), 1
    ).eval()


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("embedding", [True, False])
@torch.no_grad()
def test_quantized_model_is_near_and_fills_a_prepared_one(weights, embedding):
    model, tokens = small_glm(), torch.arange(24).reshape(2, 12)
    wanted = model(tokens)
    how = Quantization(weights=weights, group_size=32 if weights == "int4" else None, embedding=embedding)
    quantize_model(model, how)
    found = model(tokens)
    assert 0 < relative_error(found, wanted) < (0.03 if weights == "int8" else 0.2)
    assert isinstance(model.token_embedding, Int8TiedEmbedding if embedding else TiedEmbedding)
    assert not [name for name, layer in model.layers.named_modules() if isinstance(layer, nn.Linear)]
    empty = small_glm()
    prepare_quantized(empty, how)
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty(tokens), found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("packed", [True, False])
@torch.no_grad()
def test_a_quantized_model_is_cast_as_any_other(weights, dtype, packed, monkeypatch):
    model, tokens = small_glm(), torch.arange(24).reshape(2, 12)
    quantize_model(model, Quantization(weights=weights, group_size=32 if weights == "int4" else None))
    if not packed:
        monkeypatch.setattr(quantized_linear, "max_few_rows", lambda: 0)
        monkeypatch.setattr(quantized_linear, "has_packed_kernel", lambda kind, device: False)
        monkeypatch.setattr(quantized_linear, "_has_fast_bfloat16", lambda device: False)
    scales = {name: value for name, value in model.state_dict().items() if "scale" in name}
    for rows in (tokens[:1, :8], tokens):  # of each kind of product
        wanted = model(rows)
        found = copy.deepcopy(model).to(dtype)(rows)
        assert found.dtype == dtype
        assert relative_error(found.double(), wanted.double()) < 0.03
    there_and_back = model.half().float()
    assert len(scales) == 9
    for name, value in there_and_back.state_dict().items():
        assert "scale" not in name or torch.equal(value, scales[name])


@torch.no_grad()
def test_sums_beyond_what_float16_holds_are_scaled_before_they_are_rounded():
    layer = Int8Linear.of(_with_weight(torch.full((16, 64), 0.01))).half()
    for rows in (1, PACKED_MAX_ROWS + 1):  # 64 * 50 * 127 is above 65504, times the scale it is 32
        found = layer(torch.full((rows, 64), 50.0, dtype=torch.float16))
        torch.testing.assert_close(found.float(), torch.full((rows, 16), 32.0), rtol=0.01, atol=0)


def test_a_model_without_layers_is_refused():
    with pytest.raises(UserError, match="no linear layers"):
        quantize_model(nn.Sequential(nn.Linear(32, 32)), Quantization(weights="int8"))


def test_gradients_pass_to_the_input():
    layer, hidden = Int8Linear.of(linear()), torch.randn(1, 128, requires_grad=True)
    layer(hidden).sum().backward()
    torch.testing.assert_close(hidden.grad, layer.weight.sum(0, keepdim=True), rtol=1e-4, atol=1e-4)
