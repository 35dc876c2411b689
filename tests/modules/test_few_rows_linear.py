"""The linear layer of generation gives what torch's own gives, whichever kernel it takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ftk.modules import few_rows as module
from ftk.modules.few_rows import FEW_ROWS, FewRowsLinear, linear
from ftk.modules.few_rows import max_few_rows as own_rows


@pytest.mark.parametrize("shape", [(1, 24), (1, 1, 24), (3, 4, 24), (FEW_ROWS, 24), (FEW_ROWS + 1, 24), (0, 24)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_equals_torchs_own(shape, with_bias, dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(shape, dtype=dtype), torch.randn(10, 24, dtype=dtype)
    bias = torch.randn(10, dtype=dtype) if with_bias else None
    with torch.inference_mode():
        torch.testing.assert_close(linear(hidden, weight, bias), nn.functional.linear(hidden, weight, bias))


def test_a_transposed_input_and_a_slice_of_the_weights_are_read_right():
    torch.manual_seed(0)
    hidden, weight = torch.randn(24, 3).T, torch.randn(20, 48)[::2, :24]
    with torch.no_grad():
        torch.testing.assert_close(linear(hidden, weight), hidden @ weight.T)


@pytest.fixture
def calls(monkeypatch):
    """How often torch's own function was asked."""
    found = []
    own = module.F.linear
    monkeypatch.setattr(module.F, "linear", lambda *given: found.append(1) or own(*given))
    return found


def test_few_rows_without_gradients_take_the_other_kernel(calls):
    if not (module.max_few_rows() or module._has_onednn()):
        pytest.skip("neither our own kernel nor oneDNN is there")
    layer = FewRowsLinear(24, 10)
    with torch.inference_mode():
        layer(torch.randn(8, 24))
    assert not calls


def test_training_many_rows_and_autocast_take_torchs_own(calls, monkeypatch):
    monkeypatch.setattr(module, "_max_rows_of_onednn", lambda: FEW_ROWS)
    layer = FewRowsLinear(24, 10)
    layer(torch.randn(8, 24)).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        layer(torch.randn(FEW_ROWS + 1, 24))
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(8, 24)).dtype == torch.bfloat16
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("capability", "processor", "rows"),
    [("AVX512", "AuthenticAMD", math.inf), ("AVX512", "GenuineIntel", FEW_ROWS), ("AVX2", "AuthenticAMD", FEW_ROWS)],
)
def test_many_rows_go_to_onednn_where_mkl_leaves_avx_512_unused(monkeypatch, capability, processor, rows):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(module.Path, "read_bytes", lambda path: f"vendor_id\t: {processor}\n".encode())
    assert module._max_rows_of_onednn.__wrapped__() == rows
    monkeypatch.setattr(module, "_max_rows_of_onednn", lambda: rows)
    layer, hidden = FewRowsLinear(24, 10), torch.randn(3, FEW_ROWS, 24)
    with torch.no_grad():
        torch.testing.assert_close(layer(hidden), hidden @ layer.weight.T + layer.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "sizes", "share"), [(10, 40, 4), (1 << 15, 200, 32)], ids=["small", "large"])
def test_few_numbers_of_rows_occur(monkeypatch, dtype, outputs, sizes, share):
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN multiplies no bfloat16 here")
    monkeypatch.setattr(module, "_max_rows_of_onednn", lambda: math.inf)
    monkeypatch.setattr(module, "_has_onednn", lambda: True)
    monkeypatch.setattr(module, "max_few_rows", lambda: 8)
    met, weight = set(), torch.randn(outputs, 24, dtype=dtype)

    def product(hidden, weight, bias):
        met.add(hidden.numel() // 24)
        return hidden[..., :10] + 1

    monkeypatch.setattr(module, "_pointwise", product)
    monkeypatch.setattr(module.F, "linear", product)
    with torch.no_grad():
        for num_rows in range(9, 1001):
            hidden = torch.randn(1, num_rows, 24, dtype=dtype)
            assert torch.equal(linear(hidden, weight), hidden[..., :10] + 1)
            assert num_rows <= max(met) <= num_rows + num_rows // share
    assert len(met) <= sizes


@pytest.mark.parametrize("max_few_rows", [0, 8])
@pytest.mark.parametrize("has_onednn", [True, False])
def test_without_one_kernel_or_both_the_layer_works(monkeypatch, max_few_rows, has_onednn):
    monkeypatch.setattr(module, "max_few_rows", lambda: min(max_few_rows, own_rows()))
    if not has_onednn:
        monkeypatch.setattr(module, "_has_onednn", lambda: False)
    layer = FewRowsLinear(24, 10)
    with torch.no_grad():
        for num_rows in (2, 8, 9, FEW_ROWS):
            hidden = torch.randn(num_rows, 24)
            torch.testing.assert_close(layer(hidden), hidden @ layer.weight.T + layer.bias)


def test_what_records_operators_sees_torchs_own(calls):
    layer = FewRowsLinear(24, 10).requires_grad_(False)
    with torch.no_grad():
        recorded = make_fx(lambda hidden: layer(hidden))(torch.zeros(2, 24))
        traced = torch.jit.trace(layer, torch.zeros(2, 24), check_trace=False)
    hidden = torch.randn(2, 24)
    expected = hidden @ layer.weight.T + layer.bias
    torch.testing.assert_close(recorded(hidden), expected)
    torch.testing.assert_close(traced(hidden), expected)
    assert calls


def test_defaults_of_the_process_do_not_matter():
    layer, hidden = FewRowsLinear(24, 10), torch.randn(2, 24)
    with torch.no_grad():
        expected = layer(hidden)
        for default in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(default)
            try:
                found = layer(hidden)
            finally:
                torch.set_default_dtype(torch.float32)
            assert torch.equal(found, expected)
        with torch.device("meta"):
            found = layer(hidden)
    assert torch.equal(found, expected)


class Marked(torch.Tensor):
    """A tensor of another kind."""


def strange():
    """Inputs that a kernel which reads memory by address must not see."""
    hidden, weight, bias = torch.randn(2, 24), torch.randn(10, 24), torch.randn(10)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(hidden)
    return {
        "weight elsewhere": (hidden, weight.to("meta"), bias),
        "bias elsewhere": (hidden, weight, bias.to("meta")),
        "bias in doubles": (hidden, weight, bias.double()),
        "bias too short": (hidden, weight, bias[:3]),
        "bias for all": (hidden, weight, bias[:1]),
        "other inputs": (hidden[:, :23], weight, bias),
        "a vector as weight": (hidden, weight[0], None),
        "another kind": (hidden.as_subclass(Marked), weight, bias),
        "fake": (fake, weight, bias),
        "lazily negated": (torch._neg_view(hidden), weight, bias),
        "sparse": (hidden.to_sparse(), weight, bias),
    }


@pytest.mark.parametrize("name", strange())
def test_what_is_no_plain_memory_is_left_to_torch(name):
    plain = torch.randn(2, 24), torch.randn(10, 24), torch.randn(10)
    with torch.no_grad():
        assert module._has_few_rows(*plain)
        assert not module._has_few_rows(*strange()[name])


def test_transforms_of_functions_go_through():
    layer, hidden = FewRowsLinear(24, 10).requires_grad_(False), torch.randn(3, 2, 24)
    direction = torch.randn(3, 2, 24)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(layer)(hidden), layer(hidden))
        _, change = torch.func.jvp(layer, (hidden,), (direction,))
        torch.testing.assert_close(change, direction @ layer.weight.T)
