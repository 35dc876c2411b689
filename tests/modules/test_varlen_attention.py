"""Attention by runs of keys is that of the mask; torch's flash kernel, which a CPU has not, by its slow twin."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ftk.model_parallel.config import EngineConfig
from ftk.model_parallel.engine import prepare_model
from ftk.models import build_model
from ftk.modules import varlen_attention
from ftk.modules.attention import Front, attend_with_front
from ftk.modules.attention_forms import sequence_attention
from ftk.modules.masked_attention import MaskedAttention
from ftk.modules.masks import Visibility
from ftk.modules.varlen_attention import Runs, VarlenAttention

CPU = torch.device("cpu")
CONTEXT, LENGTHS = torch.tensor([9, 0, 24, 30, 1]), torch.tensor([24, 1, 9, 0, 23])


def slow_flash_attention(query, key, value, runs, scale, dropout=0.0):
    """One run after another, the causal triangle at the lower right, as the kernel's documentation has it."""
    assert runs.queries.dtype == runs.keys.dtype == torch.int32
    assert (runs.queries[-1], runs.keys[-1]) == (len(query), len(key))
    group = query.size(1) // key.size(1)
    parts = []
    for (q, q_end), (k, k_end) in zip(*(itertools.pairwise(ends.tolist()) for ends in runs[:2]), strict=True):
        assert 0 <= q_end - q <= runs.max_queries
        assert 0 <= k_end - k <= runs.max_keys
        own, keys, values = query[q:q_end], key[k:k_end], value[k:k_end]
        if k_end == k:
            parts.append(own * 0.0)
            continue
        keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
        scores = torch.einsum("qad,kad->aqk", own, keys) * (query.size(-1) ** -0.5 if scale is None else scale)
        if runs.is_causal:
            seen = torch.ones(q_end - q, k_end - k, dtype=torch.bool, device=query.device).tril(k_end - k - (q_end - q))
            scores = scores.masked_fill(~seen, float("-inf"))
        parts.append(torch.einsum("aqk,kad->qad", scores.softmax(-1), values))
    return torch.cat(parts)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "flash_attention", slow_flash_attention)


def inputs_of(num_keys: int = 24, num_kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 24), (num_kv_heads, num_keys), (num_kv_heads, num_keys)
    return [torch.randn(5, *shape, 16, generator=generator).requires_grad_() for shape in shapes]


PACKED = torch.tensor([[0] * 10 + [1] * 8 + [0] * 2 + [1] * 2 + [0, 1], [3] * 9 + [0] * 9 + [-1] * 6]).repeat(3, 1)[:5]
CASES = {
    "packed behind a prefix": (Visibility(CONTEXT, documents=PACKED, num_documents=8), 24, 2),
    "packed": (Visibility(documents=PACKED, num_documents=4), 24, 1),
    "prefix": (Visibility(CONTEXT), 24, 2),
    "shared keys": (Visibility(CONTEXT), 24, 1),
    "lengths": (Visibility(causal=False, length=LENGTHS), 24, 2),
    "another sequence": (Visibility(causal=False, length=LENGTHS.clamp(max=17)), 17, 2),
}


@pytest.mark.parametrize(("visibility", "num_keys", "num_kv_heads"), CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_the_mask(visibility, num_keys, num_kv_heads) -> None:
    inputs = inputs_of(num_keys, num_kv_heads)
    computed, expected = (
        sequence_attention(form, visibility, 24, CPU, num_keys=None if num_keys == 24 else num_keys)
        for form in ("varlen", "sdpa")
    )
    assert (type(computed), type(expected)) == (VarlenAttention, MaskedAttention)
    for scale in (None, 0.1):
        found, wanted = computed(*inputs, scale=scale), expected(*inputs, scale=scale)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        seed = torch.randn_like(wanted)
        gradients = (torch.autograd.grad(result, inputs, seed) for result in (found, wanted))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_a_bias_and_keys_in_front_are_left_to_the_mask() -> None:
    inputs, bias = inputs_of(), torch.randn(1, 2, 24, 24)
    front = Front(*torch.randn(2, 1, 2, 3, 16))
    varlen, sdpa = (sequence_attention(form, Visibility(CONTEXT), 24, CPU) for form in ("varlen", "sdpa"))
    assert torch.equal(varlen(*inputs, bias=bias), sdpa(*inputs, bias=bias))
    assert torch.equal(attend_with_front(varlen, front)(*inputs), attend_with_front(sdpa, front)(*inputs))


OTHERS = {
    "causal alone": Visibility(),
    "all": Visibility(causal=False),
    "documents": Visibility(CONTEXT, documents=torch.zeros(5, 24, dtype=torch.long)),
    "window": Visibility(CONTEXT, window=3),
    "causal up to a length": Visibility(length=LENGTHS),
}


@pytest.mark.parametrize("visibility", OTHERS.values(), ids=OTHERS)
def test_all_else_is_sdpa(visibility) -> None:
    assert isinstance(sequence_attention("varlen", visibility, 24, CPU), MaskedAttention)


def test_the_kernel_is_torchs_with_dropout_and_traced(monkeypatch) -> None:
    """Its arguments, by torch's own rule for shapes: the call is made on the meta device."""
    monkeypatch.undo()
    meta = torch.device("meta")
    query, key, value = (torch.empty(2, 4, 128, 64, device=meta, dtype=torch.bfloat16) for _ in range(3))
    attend = sequence_attention("varlen", Visibility(torch.empty(2, dtype=torch.long, device=meta)), 128, meta, 0.1)
    attended = attend._replace(dtype=torch.bfloat16)(query, key, value)
    assert (attended.shape, attended.dtype) == (query.shape, torch.bfloat16)


@pytest.mark.parametrize("max_queries", [1, 7])
def test_the_kernel_is_never_told_that_all_runs_are_of_one_query(monkeypatch, max_queries) -> None:
    monkeypatch.undo()
    told = []
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", lambda *given, **more: told.append(given) or given)
    bounds = torch.zeros(4, dtype=torch.int32)
    varlen_attention.flash_attention(*inputs_of(), Runs(bounds, bounds, max_queries, 9, True), None)
    [(*_, queries, keys, most, max_keys, dropout, is_causal, _)] = told
    assert (queries is bounds, keys is bounds, most, max_keys) == (True, True, max(max_queries, 2), 9)
    assert (dropout, is_causal) == (0.0, True)


PACKED_ROWS = {"document_ids": PACKED, "num_documents": 8}


@pytest.mark.parametrize(
    ("checkpointing", "compile", "more"), [("none", "none", PACKED_ROWS), ("selective", "block", {})]
)
def test_a_model_computes_the_same(monkeypatch, checkpointing, compile, more) -> None:
    """Context of each length; packed; with checkpointing, and traced in a block."""
    tokens, context = torch.arange(5 * 24).view(5, 24) % 16, CONTEXT.clamp(max=24)
    results = []
    for form in ("sdpa", "varlen"):
        monkeypatch.setattr("ftk.models.base.attention_form", lambda *about, form=form, **more: form)
        model = build_model("glm_tiny", vocab_size=16, num_layers=2, dropout=0.0, embedding_dropout=0.0,
                            attention_dropout=0.0)  # fmt: skip
        model.init_weights(1)
        prepare_model(model, EngineConfig(activation_checkpointing=checkpointing), CPU)
        if compile == "block":
            for layer in model.layers:
                layer.compile(backend="eager")
        loss = model(tokens, context_length=context, **more).logsumexp(-1).sum()
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
