"""The kernels of Triton for a step give what the operators of the layer give, and can be compiled."""

from __future__ import annotations

import pytest

from ftk.modules.flex_attention import HAS_TRITON
from tests.modules.triton_interpreter import run_interpreted

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton, which comes with torch for CUDA")


@pytest.mark.slow  # a minute, on machines that have Triton
def test_interpreted_kernels():
    run_interpreted("interpreted_few_rows_triton.py")


def compiled(kernel, constants, **options):
    """For a GPU that need not be there. Tensors are bfloat16, but for those whose types are always the same."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    others = {"places": "*i64", "cos": "*fp32", "sin": "*fp32", "logs": "*fp32", "eps": "fp32"}
    others |= dict.fromkeys(("num_rows", "mask_row", "mask_token", "length", "capacity"), "i32")
    types = {name: "constexpr" if name in constants else others.get(name, "*bf16") for name in kernel.arg_names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(types.values()) if kind.startswith("*")}
    return compile(ASTSource(kernel, types, constants, aligned), target=GPUTarget("cuda", 90, 32), options=options)


SHAPES = [(1024, 3072, 1, True, ""), (1024, 4096, 1, True, "gelu_tanh"), (4096, 1024, 1, False, "")]
GATED = (2048, 8192, 2, True, "silu")


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize(("inputs", "outputs", "matrices", "normed", "activation"), [*SHAPES, GATED])
def test_products_fit_into_a_processor(inputs, outputs, matrices, normed, activation, rows):
    from ftk.modules import few_rows_triton as own

    given = {"INPUTS": inputs, "OUTPUTS": outputs, "IS_CENTRED": True, "ACTIVATION": activation, "OVERLAPS": True}
    given |= {} if normed else {"norm_weight": None, "norm_bias": None}
    given |= {} if matrices == 2 else {"gate": None, "gate_bias": None}
    if rows == 1:
        kernel, (block_i, block_o, warps) = own.kernels.one_row, own._tile_of_one(inputs, outputs, 2 * matrices)
        given |= {"logs": None, "SPLITS": own.SPLITS, "HEADS": 1}
    else:
        kernel, (block_i, block_o, warps) = own.kernels.some_rows, own._tile_of_some(inputs, outputs, matrices, rows)
        given |= {"PARTS": warps, "ROWS": rows}
    given |= {"BLOCK_I": block_i, "BLOCK_O": block_o}
    found = compiled(kernel, given, num_warps=warps, num_stages=2 if normed else 3, launch_pdl=True)
    assert found.metadata.shared <= 99 * 1024  # what the smallest of Ampere has
    text = found.asm["ptx"]
    early, late = text.split("griddepcontrol.wait", 1)
    assert early.count("ld.global") > early.count("st.global") == 0, "weights are not read early"
    assert "st.global" in late


@pytest.mark.parametrize("turns", [0, 32])
@pytest.mark.parametrize(("group", "size"), [(1, 64), (4, 128)])
def test_attention_fits_into_a_processor(group, size, turns):
    from ftk.modules import few_rows_triton as own

    given = {"HEADS": 8, "GROUP": group, "SIZE": size, "WIDTH": 1, "TURNS": turns, "IS_INTERLEAVED": False}
    given |= {"OVERLAPS": True, "BLOCK_D": size, "BLOCK_W": 1, "BLOCK_S": 8192 // size, "logs": None}
    given |= {} if turns else {"cos": None, "sin": None}
    found = compiled(own.kernels.attended, given, num_warps=8, launch_pdl=True)
    assert found.metadata.shared <= 99 * 1024
    assert "cp.async" in found.asm["ptx"], "blocks are not read ahead"
