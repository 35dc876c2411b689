"""The tests of `ftk.modules.few_rows_triton` without a GPU: Triton interprets the kernels, on tensors of the CPU.

It does so in a process that begins with TRITON_INTERPRET=1: `test_few_rows_triton.py` starts it.
"""

from __future__ import annotations

import copy

import pytest
import torch
import triton
from torch import nn

from ftk.generation.engine.stepping import StepAttention
from ftk.modules import few_rows_layer, few_rows_triton
from ftk.modules.attention import Attention, Front
from ftk.modules.feed_forward import FeedForward, GatedFeedForward
from ftk.modules.few_rows_layer import prepare
from ftk.modules.kv_cache import KeyValueCache
from ftk.modules.norms import RMSNorm
from ftk.modules.rotary import Rope, RotaryAttention
from ftk.modules.transformer_layer import TransformerLayer
from tests.modules.triton_interpreter import mend_interpreter

mend_interpreter()

CAPACITY, LENGTH, INNER = 150, 141, 136  # of slots more than one block
GATED = (GatedFeedForward, {}, RMSNorm)
FORMS = {
    "gpt2": (2, 64, {}, FeedForward, {"activation": "gelu_tanh"}, nn.LayerNorm, None),
    "exact GELU": (2, 32, {}, FeedForward, {"activation": "gelu"}, nn.LayerNorm, None),
    "no bias, ReLU": (
        2, 80, {"bias": False, "output_bias": False}, FeedForward, {"activation": "relu", "bias": False}, nn.LayerNorm,
        None,
    ),
    "llama": (2, 64, {"bias": False, "output_bias": False}, *GATED, Rope(1e4, 64)),
    "shared keys": (4, 64, {"num_kv_heads": 2}, *GATED, Rope(1e4, 64)),
    "one key head, half rotated": (2, 128, {"num_kv_heads": 1}, *GATED, Rope(1e4, 64)),
    "pairs, biased gate": (
        2, 80, {}, GatedFeedForward, {"activation": "gelu", "bias": True}, RMSNorm, Rope(1e4, 32, interleaved=True)
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    """By few large programs, as interpreting one takes milliseconds."""
    monkeypatch.setattr(few_rows_layer, "_takes_triton", lambda device: True)
    monkeypatch.setattr(few_rows_triton, "_tile_of_one", lambda inputs, *given: (triton.next_power_of_2(inputs), 64, 4))
    monkeypatch.setattr(few_rows_triton, "_tile_of_some", lambda inputs, *given: (128, 64, 4))


@pytest.fixture
def runs(monkeypatch):
    """How often the kernels were run."""
    found, run = [], few_rows_triton.LayerKernels.run
    monkeypatch.setattr(few_rows_triton.LayerKernels, "run", lambda *given: found.append(1) or run(*given))
    return found


def layer_of(form, dtype=torch.float32):
    heads, size, attention, network, options, norm, _ = FORMS[form]
    torch.manual_seed(0)
    hidden = heads * size
    layer = TransformerLayer(
        Attention(hidden, heads, **attention), network(hidden, INNER, **options), lambda: norm(hidden, eps=1e-5)
    ).eval()
    for name, parameter in layer.named_parameters():
        nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.1)
    return nn.ModuleList([layer.to(dtype)])


def step_of(layer, form, num_rows=2, width=1, masked=True, front=None, length=LENGTH):
    """hidden [R, W, H] and an attend; both anew, the same in each call."""
    generator, like = torch.Generator().manual_seed(1), layer.attention_norm.weight
    device, dtype = like.device, like.dtype
    cache = KeyValueCache(num_rows + 1, CAPACITY, torch.empty(layer.attention.key_shape, dtype=dtype, device=device))
    for buffer in cache._written():
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    slots = torch.arange(num_rows)[:, None] * 3 + 20 + torch.arange(width)
    if not masked:
        slots = slots * 0 + length - width + torch.arange(width)
    places = cache.step_index(slots.to(device))
    for buffer in cache._written():  # what was there before is not looked at
        buffer.view(-1, buffer.size(-1))[places] = float("nan")
    mask = None
    if masked:  # row 0 sees few, the others many; of the new ones a hypothesis sees its own
        mask = torch.zeros(num_rows + 1, width, CAPACITY, dtype=dtype)
        mask[0, :, 25:] = float("-inf")
        mask[:, :, 3:9] = float("-inf")
        for row, own in enumerate(slots):
            mask[row, :, own] = float("-inf")
            mask[row, torch.arange(width), own] = 0.0
        mask = mask.to(device)[:num_rows, None, :, :length]
    attend = StepAttention(cache, places, mask, length, front)
    if (rope := FORMS[form][-1]) is not None:
        positions = torch.arange(num_rows)[:, None] * 5 + 20 + torch.arange(width)
        attend = RotaryAttention(attend, *rope.tables(positions.to(device)), rope.interleaved)
    hidden = torch.randn(num_rows, width, layer.attention.output.out_features, generator=generator)
    return hidden.to(like), attend


def cache_of(attend):
    return getattr(attend, "attend", attend).cache._written()


def distance(one, other):
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("num_rows", "width", "masked", "dtype"),
    [
        (1, 1, True, torch.float32),
        (1, 1, False, torch.bfloat16),
        (2, 1, True, torch.bfloat16),
        (2, 2, True, torch.float32),
        (1, 3, False, torch.float16),  # Triton cannot interpret products of bfloat16 by tensor cores
        (8, 1, True, torch.float16),
        (3, 5, True, torch.float16),
        (6, 1, True, torch.float32),  # here and in the next products are torch's
        (6, 3, True, torch.float16),
    ],
)
@torch.inference_mode()
def test_it_is_the_layer(form, num_rows, width, masked, dtype, runs):
    layers = layer_of(form, dtype)
    own = copy.deepcopy(layers)
    prepare(own)
    given, wanted_attend = step_of(layers[0], form, num_rows, width, masked)
    wanted = layers[0](given, wanted_attend)
    hidden, attend = step_of(layers[0], form, num_rows, width, masked)
    found = own[0](hidden, attend)
    off = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]  # interpreted, bfloat16 is cut off
    assert distance(found, wanted) < off
    assert torch.equal(hidden, given)
    for mine, theirs in zip(cache_of(attend), cache_of(wanted_attend), strict=True):
        assert distance(mine, theirs) < off
    assert len(runs) == 1


@pytest.mark.parametrize("num_rows", [2, 5])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@torch.inference_mode()
def test_what_is_not_finite_stays_so_and_in_its_row(num_rows, value):
    layers = layer_of("shared keys", torch.float16)
    prepare(layers)
    hidden, attend = step_of(layers[0], "shared keys", num_rows)
    wanted = layers[0](hidden, attend)
    hidden, attend = step_of(layers[0], "shared keys", num_rows)
    hidden[1, 0, 5] = value
    found = layers[0](hidden, attend)
    assert not found[1].isfinite().any()
    others = [row for row in range(num_rows) if row != 1]
    assert torch.equal(found[others], wanted[others])


@torch.inference_mode()
def test_a_row_without_an_answer_whose_slot_lies_behind_the_mask_reads_nothing_there():
    layers = layer_of("gpt2")
    prepare(layers)
    hidden, attend = step_of(layers[0], "gpt2", num_rows=2)
    for buffer in cache_of(attend):
        buffer.nan_to_num_()
    around = torch.full((2 * LENGTH + 8,), float("nan"))
    mask = around[: 2 * LENGTH].view(2, 1, 1, LENGTH).zero_()
    places = attend.cache.step_index(torch.tensor([[3], [LENGTH]]))
    assert layers[0](hidden, attend._replace(mask=mask, places=places)).isfinite().all()


def strange():
    """Name -> what makes a prepared layer or its call one that the kernels must leave alone."""
    front = Front(torch.randn(1, 2, 2, 64), torch.randn(1, 2, 2, 64))
    return {
        "a hook": (lambda layer: layer.attention.qkv.register_forward_hook(lambda *given: None), {}),
        "another activation": (lambda layer: setattr(layer.feed_forward, "activation", torch.tanh), {}),
        "another linear layer": (lambda layer: setattr(layer.attention, "output", nn.Linear(128, 128)), {}),
        "another type": (lambda layer: layer.attention_norm.double(), {}),
        "a front": (lambda layer: None, {"front": front}),
        "many rows": (lambda layer: None, {"num_rows": few_rows_triton.MAX_TOKENS + 1, "masked": False}),
        "training": (lambda layer: layer.train(), {}),
    }


@pytest.mark.parametrize("name", strange())
@torch.no_grad()
def test_what_is_no_such_step_goes_operator_by_operator(name, runs):
    change, options = strange()[name]
    layers = layer_of("gpt2")
    prepare(layers)
    layers[0](*step_of(layers[0], "gpt2"))
    assert len(runs) == 1
    given = step_of(layers[0], "gpt2", **options)
    change(layers[0])
    try:
        layers[0](*given)
    except RuntimeError:
        assert name == "another type"  # as torch has no such product
    assert len(runs) == 1


def test_with_gradients_it_goes_operator_by_operator(runs):
    layers = layer_of("gpt2")
    prepare(layers)
    layers[0](*step_of(layers[0], "gpt2", masked=False)).sum().backward()
    assert not runs


@torch.inference_mode()
def test_what_is_loaded_or_cast_later_is_seen(runs):
    layers, other = layer_of("llama"), layer_of("llama")
    prepare(layers)
    for parameter in other.parameters():
        parameter.mul_(1.5)
    layers[0](*step_of(layers[0], "llama"))
    layers.load_state_dict(other.state_dict())
    for dtype, off in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        layers.to(dtype), other.to(dtype)
        found, wanted = (each[0](*step_of(each[0], "llama")) for each in (layers, other))
        assert distance(found, wanted) < off
    assert len(runs) == 3
