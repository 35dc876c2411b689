"""Our kernel for a few rows gives the product in doubles, and each row the same bits in any company."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

from ftk.modules import few_rows
from ftk.modules.few_rows import few_rows_linear, max_few_rows
from ftk.modules.quantized_linear import int4_rounded, unpacked_int4

LEVEL = few_rows._few_rows.use_level(-1)
pytestmark = pytest.mark.skipif(LEVEL == 0, reason="this processor has no AVX2")


@pytest.fixture(autouse=True, params=[1, 2], ids=["AVX2", "AVX-512"])
def level(request):
    """The kernels of this set of instructions, whatever else the processor has."""
    if request.param > LEVEL:
        pytest.skip("this processor has no AVX-512")
    few_rows._few_rows.use_level(request.param)
    yield request.param
    few_rows._few_rows.use_level(-1)


@pytest.fixture
def threads():
    """How many torch has now; they are put back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("outputs", [1, 3, 7, 301])
@pytest.mark.parametrize("inputs", [1, 5, 23, 64, 1700])
def test_it_is_the_product(inputs, outputs, num_threads, threads):
    threads(num_threads)
    torch.manual_seed(inputs * outputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    for num_rows in (0, 1, 2, 3, 4, 5, 8, 11, 18):
        hidden = torch.randn(num_rows, inputs)
        exact = hidden.double() @ weight.double().T
        found = few_rows_linear(hidden, weight)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * inputs**0.5)
        assert torch.equal(few_rows_linear(hidden, weight, torch.zeros(outputs)), found)
        with_bias = few_rows_linear(hidden, weight, bias)
        torch.testing.assert_close(with_bias.double(), exact + bias, rtol=1e-5, atol=1e-5 * inputs**0.5)


def weights_of(kind, outputs, inputs):
    """What the kernel is given, and the weight in doubles that it stands for."""
    torch.manual_seed(inputs * outputs)
    weight = torch.randn(outputs, inputs)
    if kind == "int8":
        values, scale = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs) / 100
        return (values, scale), values.double() * scale[:, None]
    if kind.startswith("int4"):
        size = int(kind.split("/")[1])
        packed, scales = int4_rounded(weight, size)
        values = unpacked_int4(packed).double().unflatten(1, (-1, size)) - 8.0
        scale, offset = scales.double().transpose(0, 1).unsqueeze(2).unbind(-1)
        return (packed, scales), (values * scale + offset).flatten(1)
    weight = weight.bfloat16() if kind == "bf16" else weight
    return (weight, None), weight.double()


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4/32"])
@pytest.mark.parametrize("inputs", [5, 200, 800, 1003])  # with and without a rest of a vector, and of a block
def test_a_row_gives_the_same_bits_alone_and_among_others(inputs, kind, threads):
    inputs = inputs // 32 * 32 + 32 if kind == "int4/32" else inputs
    (weight, scale), _ = weights_of(kind, 100, inputs)
    hidden, bias = torch.randn(19, inputs), torch.randn(100)
    threads(1)
    alone = torch.cat([few_rows_linear(row[None], weight, bias, scale) for row in hidden])
    for num_threads in (1, 3):
        threads(num_threads)
        for num_rows in (2, 3, 4, 5, 8, 19):
            assert torch.equal(few_rows_linear(hidden[:num_rows], weight, bias, scale), alone[:num_rows])


@pytest.mark.parametrize("outputs", [1, 7, 48, 301])
@pytest.mark.parametrize("inputs", [32, 256, 1024])
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4/32", "int4/256"])
def test_rounded_weights(kind, inputs, outputs):
    inputs = max(inputs, 256) if kind == "int4/256" else inputs
    (weight, scale), exact_weight = weights_of(kind, outputs, inputs)
    bias = torch.randn(outputs)
    for num_rows in (1, 2, 3, 4, 5, 11):
        hidden = torch.randn(num_rows, inputs)
        exact = hidden.double() @ exact_weight.T
        for given in (None, bias, bias.bfloat16()):
            found = few_rows_linear(hidden, weight, given, scale).double()
            wanted = exact if given is None else exact + given.double()
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * inputs**0.5)


def test_what_it_reads_and_gives_may_be_bfloat16():
    (weight, scale), exact = weights_of("int8", 48, 100)
    hidden = torch.randn(3, 100).bfloat16()
    found = few_rows_linear(hidden, weight, None, scale)
    assert torch.equal(found, few_rows_linear(hidden.float(), weight, None, scale).bfloat16())
    torch.testing.assert_close(found.double(), hidden.double() @ exact.T, rtol=4e-3, atol=1e-4)


def test_views_and_any_number_of_dimensions_are_read_right():
    torch.manual_seed(0)
    hidden, weight = torch.randn(24, 3).T, torch.randn(20, 48)[::2, :24]
    bias = torch.randn(20)[::2]
    torch.testing.assert_close(few_rows_linear(hidden, weight, bias), hidden @ weight.T + bias)
    stacked = torch.randn(2, 3, 4, 24)
    torch.testing.assert_close(few_rows_linear(stacked, weight, bias), stacked @ weight.T + bias)
    torch.testing.assert_close(few_rows_linear(stacked[0, 0, 0], weight), weight @ stacked[0, 0, 0])


def test_nan_and_infinity_stay_what_they_are():
    hidden = torch.tensor([[1.0, float("inf")], [float("nan"), 0.0]])
    found = few_rows_linear(hidden, torch.ones(3, 2))
    assert found[0].isinf().all()
    assert found[1].isnan().all()


def test_it_is_not_taken_on_a_processor_without_avx2(monkeypatch):
    monkeypatch.setattr(few_rows, "_has_torchs_openmp", lambda: True)
    monkeypatch.setattr(few_rows._few_rows, "use_level", lambda level: 0)
    assert max_few_rows.__wrapped__() == 0


@pytest.mark.parametrize("openmp", [0, 1])  # built without, with another than torch's
def test_it_is_not_taken_without_torchs_openmp(monkeypatch, openmp):
    monkeypatch.setattr(few_rows._few_rows, "openmp", lambda: openmp)
    assert max_few_rows.__wrapped__() == 0


def test_it_is_not_taken_where_torch_has_no_openmp(monkeypatch):
    monkeypatch.setattr(few_rows.torch._C, "__file__", few_rows._few_rows.__file__.replace("_few_rows", "_no_such"))
    assert max_few_rows.__wrapped__() == 0


@pytest.mark.parametrize(("capability", "rows"), [("AVX2", 32), ("AVX512", 16), ("AVX512_BF16", 16)])
def test_how_many_rows_depends_on_what_onednn_can_do(monkeypatch, capability, rows):
    monkeypatch.setattr(few_rows, "_has_torchs_openmp", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert max_few_rows.__wrapped__() == rows


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="built with OpenMP on Linux alone")
def test_it_is_taken_beside_a_copy_of_openmp_that_others_use(threads):
    importlib.import_module("sentencepiece")
    maps = Path("/proc/self/maps").read_text().split()
    if len({word for word in maps if "/libgomp" in word}) < 2:
        pytest.skip("this wheel of sentencepiece has no OpenMP of its own")
    assert few_rows._has_torchs_openmp()
    threads(3)
    torch.rand(1 << 20).exp_()  # large enough for three threads, which wait for more work
    running = os.listdir("/proc/self/task")
    few_rows_linear(torch.randn(8, 512), torch.randn(512, 512))  # as is this
    assert os.listdir("/proc/self/task") == running
