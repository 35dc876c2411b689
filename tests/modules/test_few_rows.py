"""Our kernel for a few rows gives the product in doubles, and each row the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from ftk.modules import few_rows
from ftk.modules.few_rows import few_rows_linear, most_int8_rows, most_rows

pytestmark = pytest.mark.skipif(not few_rows._few_rows.is_supported(), reason="this processor has no AVX2")


@pytest.fixture
def threads():
    """How many torch has now; they are put back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 7, 48, 301])
@pytest.mark.parametrize("inputs", [1, 5, 8, 23, 64, 1000])
def test_it_is_the_product(inputs, outputs, num_threads, threads):
    threads(num_threads)
    torch.manual_seed(inputs * outputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    for num_rows in (0, 1, 2, 3, 4, 5, 11, 64):
        hidden = torch.randn(num_rows, inputs)
        exact = hidden.double() @ weight.double().T
        found = few_rows_linear(hidden, weight)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * inputs**0.5)
        assert torch.equal(few_rows_linear(hidden, weight, torch.zeros(outputs)), found)
        with_bias = few_rows_linear(hidden, weight, bias)
        torch.testing.assert_close(with_bias.double(), exact + bias, rtol=1e-5, atol=1e-5 * inputs**0.5)


@pytest.mark.parametrize("inputs", [5, 200, 203])  # with and without a rest of a vector
def test_a_row_gives_the_same_bits_alone_and_among_others(inputs, threads):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(13, inputs), torch.randn(500, inputs), torch.randn(500)
    threads(1)
    alone = torch.cat([few_rows_linear(row[None], weight, bias) for row in hidden])
    for num_threads in (1, 2, 5):
        threads(num_threads)
        assert torch.equal(few_rows_linear(hidden, weight, bias), alone)


@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 7, 48, 301])
@pytest.mark.parametrize("inputs", [1, 5, 8, 23, 64, 1000])
def test_int8_weights_with_a_scale_an_output(inputs, outputs):
    torch.manual_seed(inputs * outputs)
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scale, bias = torch.rand(outputs) / 100, torch.randn(outputs)
    for num_rows in (1, 2, 3, 4, 5, 11):
        hidden = torch.randn(num_rows, inputs)
        exact = hidden.double() @ weight.double().T * scale
        for given in (None, bias):
            found = few_rows_linear(hidden, weight, given, scale).double()
            torch.testing.assert_close(found, exact + (0.0 if given is None else given), rtol=1e-5, atol=1e-4)


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


@pytest.mark.parametrize("lacking", ["is_supported", "is_threaded"])
def test_it_is_not_taken_where_something_lacks(monkeypatch, lacking):
    monkeypatch.setattr(few_rows, "_has_one_openmp", lambda: True)
    monkeypatch.setattr(few_rows._few_rows, lacking, lambda: False)
    assert most_rows.__wrapped__() == 0
    monkeypatch.setattr(few_rows, "most_rows", most_rows.__wrapped__)
    assert most_int8_rows.__wrapped__() == 0


def test_it_is_not_taken_beside_another_openmp(monkeypatch):
    monkeypatch.setattr(few_rows._few_rows, "is_threaded", lambda: True)
    monkeypatch.setattr(few_rows, "_has_one_openmp", lambda: False)
    assert most_rows.__wrapped__() == 0


@pytest.mark.parametrize(("capability", "rows"), [("AVX2", 32), ("AVX512", 8), ("AVX512_BF16", 8)])
def test_how_many_rows_depends_on_what_onednn_can_do(monkeypatch, capability, rows):
    monkeypatch.setattr(few_rows, "_has_one_openmp", lambda: True)
    monkeypatch.setattr(few_rows._few_rows, "is_threaded", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert most_rows.__wrapped__() == rows
    monkeypatch.setattr(few_rows, "most_rows", most_rows.__wrapped__)
    assert (most_int8_rows.__wrapped__() > 0) is (capability == "AVX2")


@pytest.mark.parametrize(
    ("paths", "one"),
    [
        (["/x/torch/lib/libgomp.so.1"] * 3, True),
        (["/x/torch/lib/libgomp.so.1", "/usr/lib/libgomp.so.1"], False),
        (["/x/torch/lib/libgomp-98b21ff3.so.1", "/x/my libs/libiomp5.so"], False),
        (["/usr/lib/libc.so.6"], False),
    ],
)
def test_libraries_of_threads_are_counted(monkeypatch, paths, one):
    lines = [
        f"7f0{number}-7f1 r-xp 00000000 fd:00 123                        {path}" for number, path in enumerate(paths)
    ]
    maps = "\n".join([*lines, "7f2-7f3 rw-p 00000000 00:00 0 ", "7f4-7f5 rw-p 00000000 00:00 0                [heap]"])
    monkeypatch.setattr(few_rows.sys, "platform", "linux")
    monkeypatch.setattr(few_rows.Path, "read_text", lambda self, **options: maps)
    assert few_rows._has_one_openmp() is one


def test_without_a_list_of_libraries_it_is_not_taken(monkeypatch):
    def unreadable(self, **options):
        raise PermissionError

    monkeypatch.setattr(few_rows.Path, "read_text", unreadable)
    assert few_rows._has_one_openmp() is False
