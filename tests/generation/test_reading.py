"""Frames that a kernel reads at once are read as each is by itself."""

from __future__ import annotations

import pytest
import torch

from ftk.generation.config import GenerationConfig
from ftk.generation.engine import decoder as decoders
from ftk.generation.engine import reading
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.reading import Where, flash_for, packed_runs, read_packed
from ftk.generation.engine.request import Frame, Request
from ftk.modules.kv_cache import KeyValueCache
from ftk.modules.varlen_attention import flash_attention
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation.slow import SPECIAL, small_model
from tests.generation.test_in_flight import assert_all_alike
from tests.generation.test_recorded import END, PROMPTS, causal
from tests.modules.test_varlen_attention import slow_flash_attention
from tests.tasks.glm_blank.infill.test_generator import random_contexts

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def calls(monkeypatch):
    """The kernel is there on a CPU; its calls."""
    made = []

    def counted(*given):
        made.append(given[3])
        return slow_flash_attention(*given)

    monkeypatch.setattr(decoders, "flash_for", lambda *given: counted)
    return made


@pytest.mark.parametrize("starts", [[0, 0, 0], [3, 0, 5]], ids=["first frames", "later ones"])
@pytest.mark.parametrize("prefixes", [[0, 0, 0], [4, 1, 2], [3, 0, 9]], ids=str)
def test_each_token_sees_what_the_mask_lets_it_see(starts, prefixes):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    frames = [Frame([7] * length, {"position_ids": torch.arange(length).numpy()}, {}) for length in (4, 2, 3)]
    where = Where(*(torch.tensor(part).numpy() for part in ([2, 0, 1], starts, prefixes)))
    found = []
    for flash in (None, slow_flash_attention):
        cache = KeyValueCache(3, 9, torch.zeros(2, 8))
        for buffer in cache.read(3, 9):
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1)))
        attend = read_packed(frames, where, CPU, flash=flash).attend(cache)
        found.append(attend(query, key, value, scale=0.3))
    torch.testing.assert_close(*found)


def test_plain_causal_frames_take_one_call_and_no_copy_of_keys():
    where = Where(*(torch.tensor(part).numpy() for part in ([0, 1], [0, 0], [0, 0])))
    runs = packed_runs(where, torch.tensor([4, 2]).numpy(), CPU)
    assert runs.behind.queries.tolist() == runs.behind.keys.tolist() == [0, 4, 6]
    assert runs[1:] == (None, None, None, None)


@pytest.mark.parametrize("options", [{}, {"beam": 3}], ids=str)
def test_answers_are_those_of_frames_read_one_by_one(calls, monkeypatch, options):
    model, contexts = small_model(), random_contexts(3, 10)
    found = BlankGenerator(model, SPECIAL, max_len=5, batch_size=4, **options).fill_ids(contexts)
    assert {runs.is_causal for runs in calls} == {True, False}
    monkeypatch.undo()
    plain = BlankGenerator(model, SPECIAL, max_len=5, batch_size=4, **options).fill_ids(contexts)
    assert_all_alike(found, plain)


@pytest.mark.parametrize(
    ("model", "is_called"),
    [
        (lambda: causal("llama", num_kv_heads=1), True),
        (lambda: causal("cpm1"), False),
        (lambda: causal("mistral", sliding_window=4), False),
    ],
    ids=["grouped heads", "bias", "window"],
)
def test_what_the_kernel_does_not_take_is_read_without(calls, monkeypatch, model, is_called):
    model, framing = model(), Continuation([END], 64)

    def answers():
        requests = [Request(prompt, GenerationConfig(max_len=4)) for prompt in PROMPTS]
        return engine_for(model, framing, requests, 4).answers(requests)

    found = answers()
    assert bool(calls) == is_called
    monkeypatch.undo()
    assert_all_alike(found, answers())


def test_the_kernel_is_that_of_training_where_it_runs(monkeypatch):
    assert flash_for(CPU, torch.bfloat16, 64) is None
    monkeypatch.setattr(reading, "has_flash", lambda device: device.type == "cuda")
    assert flash_for(CUDA, torch.bfloat16, 256) is flash_attention
    for dtype, head_size in ((torch.float32, 64), (torch.float16, 20), (torch.float16, 264)):
        assert flash_for(CUDA, dtype, head_size) is None
