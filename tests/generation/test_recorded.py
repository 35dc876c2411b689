"""Steps that are recorded and replayed give the answers of steps that are taken one by one."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from ftk.generation.config import GenerationConfig
from ftk.generation.engine import decoder as decoders
from ftk.generation.engine import making, recorded
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.engine import Engine
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Request
from ftk.generation.ensemble import Ensemble
from ftk.models import build_model
from ftk.tasks.glm_blank import BlankGenerator
from ftk.tasks.glm_blank.infill.language_model import LanguageModel
from tests.generation import test_encoder_decoder as two_stacks
from tests.generation.replay import Recording
from tests.generation.slow import SPECIAL, small_model
from tests.generation.test_in_flight import STRATEGIES, assert_all_alike
from tests.tasks.glm_blank.infill.test_generator import random_contexts

END = 1
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14] * 3, [15, 5], [6, 7, 8, 9, 10], [11, 12] * 6, [13], [14, 15, 5, 6]]


@pytest.fixture
def recording(monkeypatch):
    """Steps are recorded here as on a GPU, of the sizes of a small model, and sooner."""
    made = Recording()
    monkeypatch.setattr(recorded, "LEAST_SLOTS", 8)
    monkeypatch.setattr(recorded, "STEPS_BEFORE", 1)
    monkeypatch.setattr(making, "recorder_for", lambda device: made)
    return made


def test_sizes_are_few_and_waste_little():
    lengths = range(1, 5000)
    sizes = [recorded.num_slots(length) for length in lengths]
    assert all(length <= size < max(length + 128, 1.25 * length) for length, size in zip(lengths, sizes, strict=True))
    assert len(set(sizes)) < 20
    assert all(size % 128 == 0 for size in sizes)
    assert [recorded.num_rows(count) for count in (1, 2, 3, 4, 5, 8, 9, 33)] == [1, 2, 4, 4, 8, 8, 16, 40]


@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_answers_in_flight_are_those_of_plain_steps(recording, options):
    model, contexts = small_model(), random_contexts(2, 14)
    options = {**options, "max_len": 7, "batch_size": 5}
    plain = BlankGenerator(model, SPECIAL, cuda_graphs=False, **options).fill_ids(contexts)
    assert recording.num_recorded == 0, "cuda_graphs off has no effect"
    found = BlankGenerator(model, SPECIAL, **options).fill_ids(contexts)
    assert recording.num_replays > recording.num_recorded > 1
    assert_all_alike(found, plain)


def causal(name, **options):
    """Of its family a random model whose distributions are far from flat."""
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64, "vocab_size": 20}
    torch.manual_seed(0)
    model = build_model(name, **{**shape, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


@pytest.mark.parametrize(
    "model",
    [
        lambda: causal("gpt2"),
        lambda: causal("llama", num_kv_heads=1),
        lambda: causal("mistral", sliding_window=4),
        lambda: causal("cpm1"),
        lambda: Ensemble([causal("gpt2"), causal("gpt2", num_layers=1)]),
    ],
    ids=["learned positions", "rotary", "window", "bias", "ensemble"],
)
def test_other_kinds_of_models(recording, model):
    model, framing = model(), Continuation([END], 64)
    own = [{}, {"beam": 3, "nbest": 2}, {"sampling": True, "top_k": 8}, {"max_len": 4}] * 2

    def answers(**options):
        requests = [
            Request(p, GenerationConfig(**{"max_len": 9, **o, **options})) for p, o in zip(PROMPTS, own, strict=True)
        ]
        return engine_for(model, framing, requests, 3).answers(requests)

    plain, found = answers(cuda_graphs=False), answers()
    assert recording.num_replays > 3
    assert_all_alike(found, plain)


@pytest.mark.parametrize("options", [{}, {"beam": 3, "nbest": 2}])
def test_sources_of_encoder_decoders(recording, options):
    model = two_stacks.random_t5()

    def answers(**more):
        requests = [two_stacks.request(source, **options, **more) for source in two_stacks.SOURCES * 2]
        return engine_for(model, two_stacks.FRAMING, requests, 3).answers(requests)

    plain, found = answers(cuda_graphs=False), answers()
    assert recording.num_replays > 3
    assert_all_alike(found, plain)


def test_a_language_model_beside_the_model(recording):
    fused = {"language_model": LanguageModel(small_model(seed=3), SPECIAL, 0.5), "max_len": 7, "batch_size": 3}
    contexts = random_contexts(4, 8)
    plain = BlankGenerator(small_model(), SPECIAL, cuda_graphs=False, **fused).fill_ids(contexts)
    found = BlankGenerator(small_model(), SPECIAL, **fused).fill_ids(contexts)
    assert recording.num_replays > 3
    assert_all_alike(found, plain)


def lasting(model, record, num_rows=3, width=2):
    return Engine(CachedDecoder(model, num_rows, width, 40, 20, record=record), Continuation([END], 64))


def test_a_lasting_engine_records_each_size_once(recording):
    engine = lasting(causal("gpt2"), recording)
    for _ in range(3):
        engine.answers([Request(prompt, GenerationConfig(max_len=12, min_len=12)) for prompt in PROMPTS])
    once = recording.num_recorded
    engine.answers([Request(prompt, GenerationConfig(max_len=12, min_len=12)) for prompt in PROMPTS])
    assert recording.num_recorded == once
    assert once <= 2 * 8  # rows, and slots in eights
    assert recording.num_replays > 10 * once


def test_a_buffer_that_is_replaced_is_noticed(recording, monkeypatch):
    """What the comparisons above rely on: a replay sees the tensors that were there when it was recorded."""
    take = decoders.Pointers.take

    def replaced(self, other):
        take(self, other)
        self.marks, self.places = self.marks.clone(), self.places.clone()

    monkeypatch.setattr(decoders.Pointers, "take", replaced)
    with pytest.raises(IndexError):  # nothing has moved the first ones back when a row was entered again
        BlankGenerator(small_model(), SPECIAL, max_len=7, batch_size=2).fill_ids(random_contexts(2, 16))


class AsksTheDevice(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden, attend):
        assert float(hidden.sum()) < 1e9
        return self.layer(hidden, attend)


def test_a_model_whose_steps_cannot_be_recorded_is_answered_without(recording, caplog):
    model, contexts = small_model(), random_contexts(3, 6)
    plain = BlankGenerator(model, SPECIAL, cuda_graphs=False, max_len=7).fill_ids(contexts)
    model.layers[0] = AsksTheDevice(model.layers[0])
    with caplog.at_level(logging.WARNING):
        found = BlankGenerator(model, SPECIAL, max_len=7).fill_ids(contexts)
    assert recording.num_replays == 0
    [warning] = caplog.messages
    assert "cannot be recorded as a CUDA graph" in warning
    assert_all_alike(found, plain)


def test_a_step_that_fails_leaves_the_engine_right(recording, monkeypatch):
    model = causal("gpt2")
    engine, prompts = (
        lasting(model, recording),
        [Request(p, GenerationConfig(max_len=12, min_len=12)) for p in PROMPTS[:3]],
    )
    expected = engine.answers(prompts)
    replays = dict(engine.decoder._steps._replays)
    with monkeypatch.context() as broken:
        broken.setattr(engine.decoder._steps, "take", lambda rows, size, step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.answers(prompts)
    assert_all_alike(engine.answers(prompts), expected)
    assert engine.decoder._steps._replays.keys() == replays.keys()


def test_rows_of_a_mask_are_aligned_and_on_a_cpu_no_slot_is_added():
    model = causal("gpt2")
    assert CachedDecoder(model, 2, 1, 10, 3).capacity == 13
    assert CachedDecoder(model, 2, 1, 10, 3, record=Recording()).capacity == 16


def test_from_the_fourth_step_of_some_rows_on_each_size_is_recorded_once_and_few_sizes_are():
    record = Recording()
    steps, tokens = recorded.RecordedSteps(record, 8, 64, 1, torch.device("cpu")), torch.ones(2)
    counts = []
    for size in (1, 2, 1, 2, 2, 1, 3):
        assert steps.take(4, size, lambda size=size: tokens * size).tolist() == [size, size]
        counts.append((record.num_recorded, record.num_replays))
    assert counts == [(0, 0), (0, 0), (0, 0), (1, 1), (1, 2), (2, 3), (3, 4)]
    steps.take(8, 1, lambda: tokens)
    assert record.num_recorded == 3, "kernels of other rows have not run"
    for size in range(2 * recorded.MOST_GRAPHS):
        for _ in range(2):
            assert steps.take(4, size, lambda size=size: tokens * size).tolist() == [size, size]
    assert record.num_recorded == 2 * recorded.MOST_GRAPHS
    assert len(steps._replays) == recorded.MOST_GRAPHS, "those used longest ago make room"
    steps.take(4, -1, lambda: tokens)
    assert record.num_recorded == 2 * recorded.MOST_GRAPHS, "where room is short, once is not enough"


def test_steps_are_recorded_on_a_gpu_alone():
    assert recorded.recorder_for(torch.device("cpu")) is None


class FakeCuda:
    """What a capture changes in a process: the stream, where memory comes from, whether random numbers can be drawn.

    As torch has it, a capture that was spoilt raises when it is ended, and then leaves the last two as they are.
    """

    def __init__(self, monkeypatch):
        self.stream, self.pools, self.draws, self.spoilt = "main", [], True, False
        cuda = self

        class Graph:
            def capture_begin(self, pool="own", capture_error_mode="global"):
                assert cuda.stream == "side of cuda:1"
                self.pool, cuda.spoilt, cuda.draws = pool, False, False
                cuda.pools.append(pool)

            def capture_end(self):
                if cuda.spoilt or self.pool not in cuda.pools:
                    raise RuntimeError("the capture was invalidated")
                cuda.draws = True
                cuda.pools.remove(self.pool)

            def replay(self):
                pass

        @contextmanager
        def on(stream):
            before, cuda.stream = cuda.stream, stream.name
            try:
                yield
            finally:
                cuda.stream = before

        def no_longer(device, pool):
            if pool not in self.pools:
                raise RuntimeError("not recording to this pool")
            self.pools.remove(pool)

        def side(device):
            return SimpleNamespace(name=f"side of {device}", device="cpu", device_index=device.index)

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "shared")
        monkeypatch.setattr(torch.cuda, "Stream", side)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", no_longer, raising=False)

    def ask(self):
        self.spoilt = True
        raise RuntimeError("operation not permitted when stream is capturing")

    def spoil(self):
        self.spoilt = True
        return torch.ones(1)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (FakeCuda.ask, "operation not permitted"),
        (FakeCuda.spoil, "the capture was invalidated"),
        (lambda cuda: 1 / 0, "division by zero"),
        (lambda cuda: torch.ones(1), None),
    ],
    ids=["asks", "spoils", "fails", "works"],
)
def test_a_capture_leaves_the_process_as_it_was(monkeypatch, step, message):
    cuda = FakeCuda(monkeypatch)
    record = recorded.recorder_for(torch.device("cuda:1"))
    with nullcontext() if message is None else pytest.raises((RuntimeError, ZeroDivisionError), match=message):
        assert record(lambda: step(cuda))().tolist() == [1.0]
    assert (cuda.stream, cuda.pools, cuda.draws) == ("main", [], True)
