"""A step of generation leaves the device alone: the host neither asks it nor hands it anything it would wait for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ftk.generation.engine.engine import CHECK_EVERY, Engine
from ftk.generation.processors.base import Processors
from ftk.generation.processors.forbidden import ForbiddenTokens, NoRepeatNgram
from ftk.generation.processors.length import MaxLength, MinLength
from ftk.generation.processors.penalties import RepetitionPenalty, UnknownPenalty
from ftk.generation.search import random as sampling
from ftk.generation.search import ranking
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation.slow import SPECIAL, small_model

CONTEXTS = [[7, 8, 3, 9, 10], [11, 4, 12], [13, 14, 15, 5]]
MAX_LEN = 20
SEARCHES = [
    {},
    {"beam": 3},
    {"search": "diverse_beam", "beam": 4},
    {"sampling": True, "top_p": 0.9, "top_k": 12, "typical_p": 0.9, "min_p": 0.01, "nbest": 2},
    {"search": "beam_sampling", "beam": 3, "top_p": 0.9},
    {"beam": 2, "alternatives": 2},
]


class Waits(TorchFunctionMode):
    """Names of the calls in which, were the tensors on a GPU, the host would wait for it."""

    ASKS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        hands_over = name in ("tensor", "as_tensor") and kwargs.get("device") is not None
        moves = name == "to" and not kwargs.get("non_blocking")
        to_a_device = any(isinstance(one, torch.device | str) for one in (*args[1:], kwargs.get("device")))
        index = args[1] if name == "__getitem__" else ()
        by_truth = any(isinstance(one, Tensor) and one.dtype == torch.bool for one in _parts(index))
        if name in self.ASKS or hands_over or (moves and to_a_device) or by_truth:
            self.found.append(name)
        return func(*args, **kwargs)


def _parts(index):
    return index if isinstance(index, tuple) else (index,)


@pytest.fixture
def waits_of_steps(monkeypatch):
    """waits_of_steps(processors, own, **options) -> calls that would wait, step by step; asks as seldom as on a GPU."""
    steps = []
    begin, step = Engine.__init__, Engine.step

    def as_on_a_gpu(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.check_every = CHECK_EVERY

    def watched(self):
        before = self.num_steps
        with Waits() as waits:
            events = step(self)
        if self.num_steps > before:  # no request has entered
            steps.append(waits.found)
        return events

    for module in (ranking, sampling):
        monkeypatch.setattr(module, "reads_are_free", lambda device: False)
    monkeypatch.setattr(Engine, "__init__", as_on_a_gpu)
    monkeypatch.setattr(Engine, "step", watched)

    def run(processors, own=None, contexts=CONTEXTS, **options):
        steps.clear()
        generator = BlankGenerator(small_model(), SPECIAL, max_len=MAX_LEN, processors=processors, **options)
        generator.fill_ids(contexts, processors=own)
        return list(steps)

    return run


def without_a_wait():
    """The processors of which the docs say that they do not wait; nothing ends before the greatest length."""
    return [
        RepetitionPenalty(1.3, prompt=True),
        UnknownPenalty(6, 2.0),
        ForbiddenTokens([1, 3, 4, 5], 19),
        MinLength([MAX_LEN] * 9, MAX_LEN),
        MaxLength([MAX_LEN]),
    ]


@pytest.mark.parametrize("options", SEARCHES, ids=str)
@pytest.mark.parametrize("of_each", [False, True], ids=["one for all", "own"])
def test_only_every_eighth_step_asks_the_device(waits_of_steps, options, of_each):
    own = [None, Processors(without_a_wait()), Processors(without_a_wait())] if of_each else None
    steps = waits_of_steps(without_a_wait(), own, **options)
    # The first token needs no step of the decoder; the last step is followed by the answers.
    waiting = [number for number, found in enumerate(steps[:-1], start=1) if found]
    assert len(steps) >= MAX_LEN - 1
    assert all(number % CHECK_EVERY == 0 for number in waiting), steps
    assert any(steps), "the watch sees nothing"


def test_all_groups_ask_at_the_same_steps(waits_of_steps, monkeypatch):
    numbers = []  # of groups, step by step
    advance = Engine._advance

    def counted(self, logits):
        numbers.append(len(self._groups))
        advance(self, logits)

    monkeypatch.setattr(Engine, "_advance", counted)
    lengths = [1 + number % 13 for number in range(20)]  # answers that end at different steps
    own = [Processors([MinLength([length] * 9, MAX_LEN), MaxLength([length])]) for length in lengths]
    steps = waits_of_steps(
        [], own, contexts=[[7, 8 + number % 8, 3, 9 + number // 8] for number in range(20)], batch_size=8, beam=2
    )
    assert max(numbers) > 1
    assert [number for number, found in enumerate(steps, start=1) if found and number % CHECK_EVERY] == []
    assert any(steps), "the watch sees nothing"


def test_what_looks_at_tokens_on_the_host_is_seen(waits_of_steps):
    steps = waits_of_steps([*without_a_wait(), NoRepeatNgram(19)])
    assert all(steps)
