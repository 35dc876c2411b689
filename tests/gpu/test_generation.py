"""Generation on a GPU: steps replayed from CUDA graphs, prompts read by a flash kernel, no wait and no cuDNN plan."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest import TestCase

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ftk.generation.config import GenerationConfig
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.engine import Engine
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.reading import Where, flash_for, read_packed
from ftk.generation.engine.recorded import recorder_for
from ftk.generation.engine.request import Frame, Request
from ftk.generation.ensemble import Ensemble
from ftk.modules.evaluation_mode import changing_shapes
from ftk.modules.few_rows_layer import prepare
from ftk.modules.kv_cache import KeyValueCache
from ftk.modules.masked_attention import EagerAttention, fused_attention
from ftk.modules.varlen_attention import Runs, flash_attention
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation import test_encoder_decoder as two_stacks
from tests.generation.slow import SPECIAL, small_model
from tests.generation.test_in_flight import STRATEGIES, assert_alike
from tests.generation.test_recorded import END, PROMPTS, AsksTheDevice, causal
from tests.gpu.test_gpu import no_waiting
from tests.modules.test_varlen_attention import slow_flash_attention
from tests.tasks.glm_blank.infill.test_generator import random_contexts

MODELS = {
    "learned positions": lambda: causal("gpt2"),
    "rotary": lambda: causal("llama", num_kv_heads=1),
    "window": lambda: causal("mistral", sliding_window=4),
    "bias": lambda: causal("cpm1"),
    "ensemble": lambda: Ensemble([causal("gpt2"), causal("gpt2", num_layers=1)]),
}


def assert_near(found, expected):
    """Tokens equal, log-probabilities within the rounding of other kernels."""
    for row, own in zip(found, expected, strict=True):
        assert [answer.tokens for answer in row] == [answer.tokens for answer in own]
        for one, other in zip(row, own, strict=True):
            assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-3)


@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_answers_in_flight_are_those_of_the_cpu(device, options):
    contexts, given = random_contexts(2, 14), {**options, "max_len": 7, "batch_size": 5}
    expected = BlankGenerator(small_model(), SPECIAL, **given).fill_ids(contexts)
    assert_near(BlankGenerator(small_model().to(device), SPECIAL, **given).fill_ids(contexts), expected)


@pytest.fixture
def decoders(monkeypatch):
    """All decoders that are made."""
    made, begin = [], CachedDecoder.__init__

    def recorded(self, *given, **options):
        begin(self, *given, **options)
        made.append(self)

    monkeypatch.setattr(CachedDecoder, "__init__", recorded)
    return made


@pytest.mark.parametrize("kind", MODELS)
def test_replayed_steps_are_plain_steps(cuda, decoders, kind):
    model = MODELS[kind]().to(cuda)
    own = [{}, {"beam": 3, "nbest": 2}, {"sampling": True, "top_k": 8}, {"max_len": 4}] * 2

    def answers(**options):
        requests = [
            Request(prompt, GenerationConfig(**{"max_len": 9, **asked, **options}))
            for prompt, asked in zip(PROMPTS, own, strict=True)
        ]
        return engine_for(model, Continuation([END], 64), requests, 3).answers(requests)

    found = answers()
    assert decoders[-1]._steps._replays, "no step was captured"
    plain = answers(cuda_graphs=False)
    assert decoders[-1]._steps is None
    for row, expected in zip(found, plain, strict=True):
        assert_alike(row, expected)


def answer_without_graphs(process: int, device: torch.device) -> None:
    model, contexts = small_model().to(device), random_contexts(3, 6)
    plain = BlankGenerator(model, SPECIAL, cuda_graphs=False, max_len=7).fill_ids(contexts)
    model.layers[0] = AsksTheDevice(model.layers[0])
    with TestCase().assertLogs("ftk.generation.engine.recorded") as log:
        found = BlankGenerator(model, SPECIAL, max_len=7).fill_ids(contexts)
    assert "cannot be recorded as a CUDA graph" in log.output[0]
    for row, expected in zip(found, plain, strict=True):
        assert_alike(row, expected)
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    assert torch.rand(2, device=device).isfinite().all()


def test_a_step_that_cannot_be_captured_is_taken_as_it_is(cuda):
    """In a process of its own, as what it left behind would fail the tests after it."""
    torch.multiprocessing.spawn(answer_without_graphs, (cuda,))


def test_replayed_steps_of_encoder_decoders(cuda, decoders):
    model = two_stacks.random_t5().to(cuda)
    found = []
    for allowed in (True, False):
        requests = [two_stacks.request(source, beam=3, cuda_graphs=allowed) for source in two_stacks.SOURCES * 2]
        found.append(engine_for(model, two_stacks.FRAMING, requests, 3).answers(requests))
    assert decoders[0]._steps._replays
    for row, expected in zip(*found, strict=True):
        assert_alike(row, expected)


def test_a_step_never_waits_for_the_device(device):
    model = causal("gpt2").to(device)
    decoder = CachedDecoder(model, 4, 2, 40, 20, record=recorder_for(device))
    engine = Engine(decoder, Continuation([END], 64))
    for prompt in PROMPTS[:4]:
        engine.submit(Request(prompt, GenerationConfig(max_len=20, min_len=20, beam=2)))
    for _ in range(6):  # read, captured
        engine.step()
    tokens = torch.full((4, 2), 5, device=device)
    sources = torch.zeros(4, 2, dtype=torch.int64, device=device)
    with torch.inference_mode(), no_waiting(device):
        for _ in range(6):
            decoder.reorder(sources)
            decoder.step(tokens)


def test_sdpa_does_not_choose_cudnn_where_shapes_change(cuda):
    given = [torch.randn(2, 4, count, 64, device=cuda, dtype=torch.bfloat16) for count in (1, 96, 96)]
    with changing_shapes():
        assert torch._fused_sdp_choice(*given, torch.zeros(2, 1, 1, 96, device=cuda, dtype=torch.bfloat16)) != 3


@pytest.mark.parametrize(("count", "dtype"), [(1, torch.bfloat16), (3, torch.bfloat16), (96, torch.float32)])
def test_shared_keys_have_a_fast_kernel_under_a_mask_and_in_float32(cuda, count, dtype):
    query, key = (
        torch.randn(2, heads, length, 64, device=cuda, dtype=dtype) for heads, length in ((8, count), (2, 96))
    )
    is_causal = dtype == torch.float32
    mask = torch.zeros(2, 1, count, 96, device=cuda, dtype=dtype)
    mask[1, :, :, 50:] = -torch.inf
    plain = torch.full((96, 96), -torch.inf, device=cuda).triu(1) if is_causal else mask
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        found = fused_attention(query, key, key, None if is_causal else mask, is_causal)
    torch.testing.assert_close(found, EagerAttention(plain)(query, key, key), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_kv_heads", [4, 1])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("ends", [[0, 3, 3, 10, 12], [0, 1, 1, 2, 3]], ids=["longer", "of one query at most"])
def test_the_flash_kernel_takes_runs_as_they_are_meant(cuda, num_kv_heads, is_causal, ends):
    if flash_for(cuda, torch.bfloat16, 64) is None:
        pytest.skip("needs a GPU with flash attention")
    bounds = (ends, [0, 5, 9, 16, 40])  # a run without queries; more keys than queries
    queries, keys = (torch.tensor(bound, dtype=torch.int32, device=cuda) for bound in bounds)
    parts = [
        torch.randn(count, heads, 64, device=cuda, dtype=torch.bfloat16)
        for count, heads in ((ends[-1], 4), (40, num_kv_heads), (40, num_kv_heads))
    ]
    runs = Runs(queries, keys, 7 if ends[-1] > 3 else 1, 24, is_causal)
    found, expected = (
        flash_attention(*parts, runs, 0.2),
        slow_flash_attention(*(part.float() for part in parts), runs, 0.2),
    )
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("starts", [[0, 0, 0], [3, 0, 5]], ids=["first frames", "later ones"])
def test_packed_prompts_are_read_as_one_by_one(cuda, starts):
    flash = flash_for(cuda, torch.bfloat16, 64)
    if flash is None:
        pytest.skip("needs a GPU with flash attention")
    frames = [Frame([7] * length, {"position_ids": np.arange(length)}, {}) for length in (40, 2, 31)]
    where = Where(*(np.array(part) for part in ([2, 0, 1], starts, [40, 1, 2])))
    parts = [torch.randn(1, heads, 73, 64, device=cuda, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    found = []
    for kernel in (None, flash):
        cache = KeyValueCache(3, 48, torch.zeros(2, 64, device=cuda, dtype=torch.bfloat16))
        found.append(read_packed(frames, where, cuda, flash=kernel).attend(cache)(*parts))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


@pytest.fixture
def kernels(cuda, monkeypatch):
    """The tests of the kernels of Triton without a GPU, and how often these were run."""
    pytest.importorskip("triton")
    from ftk.modules import few_rows_triton
    from tests.modules import interpreted_few_rows_triton as own

    found, run = [], few_rows_triton.LayerKernels.run
    monkeypatch.setattr(few_rows_triton.LayerKernels, "run", lambda *given: found.append(1) or run(*given))
    return SimpleNamespace(tests=own, runs=found, module=few_rows_triton.kernels)


@pytest.mark.parametrize(
    ("num_rows", "width", "masked", "dtype"),
    [(1, 1, True, torch.bfloat16), (3, 5, True, torch.bfloat16), (1, 2, False, torch.float32)],
)
@torch.inference_mode()
def test_kernels_of_a_step_are_the_layer(cuda, kernels, num_rows, width, masked, dtype):
    own, off = kernels.tests, {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for form in own.FORMS:
        layers = own.layer_of(form, dtype).to(cuda)
        given = form, num_rows, width, masked
        hidden, wanted_attend = own.step_of(layers[0], *given)
        wanted = layers[0](hidden, wanted_attend)
        prepare(layers)
        hidden, attend = own.step_of(layers[0], *given)
        found = layers[0](hidden, attend)
        assert own.distance(found, wanted) < off, form
        for mine, theirs in zip(own.cache_of(attend), own.cache_of(wanted_attend), strict=True):
            assert own.distance(mine, theirs) < off, form
    assert len(kernels.runs) == len(own.FORMS)


@pytest.mark.parametrize("num_rows", [1, 8])
@torch.inference_mode()
def test_a_layer_of_kernels_is_replayed(cuda, kernels, num_rows):
    """Again and again, as one kernel begins before the one in front of it ends."""
    own, form = kernels.tests, "shared keys"
    layers = own.layer_of(form, torch.bfloat16).to(cuda)
    prepare(layers)
    hidden, attend = own.step_of(layers[0], form, num_rows)
    layers[0](hidden, attend)  # compiles
    replay = recorder_for(cuda)(lambda: layers[0](layers[0](hidden, attend), attend))
    for _ in range(50):
        hidden.normal_()
        found = replay().clone()
        assert torch.equal(found, layers[0](layers[0](hidden, attend), attend))


@torch.inference_mode()
def test_other_numbers_of_slots_compile_nothing(cuda, kernels):
    own, form = kernels.tests, "gpt2"
    layers = own.layer_of(form, torch.bfloat16).to(cuda)
    prepare(layers)
    found = []
    for length in (141, 64, 65, 128, 48):
        layers[0](*own.step_of(layers[0], form, 3, length=length))
        parts = (kernels.module.one_row, kernels.module.some_rows, kernels.module.attended)
        found.append(sum(len(caches[0]) for part in parts for caches in part.device_caches.values()))
    assert len(set(found)) == 1
    assert len(kernels.runs) == len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "glm"])
def test_answers_by_kernels_are_those_by_operators(cuda, kernels, kind, count, dtype):
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_layers": 2}

    def answers(model):
        if kind == "glm":
            generator = BlankGenerator(model, SPECIAL, max_len=12, min_len=12, batch_size=count)
            return generator.fill_ids([[7, 8, 3, 9][: 3 + row % 2] for row in range(count)])
        requests = [Request(prompt, GenerationConfig(max_len=12, min_len=12)) for prompt in PROMPTS[:count]]
        return engine_for(model, Continuation([END], 64), requests, count).answers(requests)

    if kind == "glm":
        model = small_model(**shape)
    else:
        model = causal(kind, **shape, **({"num_kv_heads": 2} if kind == "llama" else {}))
    model = model.to(cuda, dtype)
    wanted = answers(model)
    assert not kernels.runs
    prepare(model)
    found = answers(model)
    assert kernels.runs
    if dtype == torch.float32:
        return assert_near(found, wanted)
    for row, own in zip(found, wanted, strict=True):  # the same as long as rounding has not chosen another token
        pairs = zip(row[0].tokens, own[0].tokens, row[0].token_logprobs, own[0].token_logprobs, strict=True)
        same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert len(same) >= 3
        for _, _, mine, theirs in same:
            assert mine == pytest.approx(theirs, abs=0.25)
