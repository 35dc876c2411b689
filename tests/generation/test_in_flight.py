"""Prompts that come and go give the answers that they give in batches and alone, in memory that does not grow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ftk.generation.engine import making
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.processors import Processor
from ftk.tasks.glm_blank import BlankGenerator
from ftk.tasks.glm_blank.infill.language_model import LanguageModel
from tests.generation import slow
from tests.generation.slow import SPECIAL, small_model
from tests.tasks.glm_blank.infill.test_generator import random_contexts

STRATEGIES = [
    {},
    {"min_len": 3},
    {"beam": 3, "nbest": 2},
    {"beam": 4, "length_penalty": 0.4, "early_stopping": "never"},
    {"sampling": True, "seed": 4, "top_p": 0.9},
    {"sampling": True, "nbest": 3},
    {"search": "diverse_beam", "beam": 4, "diverse_groups": 2},
    {"search": "beam_sampling", "beam": 3},
]


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture
def decoders(monkeypatch):
    """All decoders that are made, each with the number of its steps."""
    made = []

    class Recorded(CachedDecoder):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            self.num_steps = 0
            made.append(self)

        def step(self, tokens):
            self.num_steps += 1
            return super().step(tokens)

    monkeypatch.setattr(making, "CachedDecoder", Recorded)
    return made


def assert_alike(found, expected):
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, rtol=0, atol=1e-5)
        assert one.score == pytest.approx(other.score, abs=1e-5)
        assert_alike(one.others, other.others)


def assert_all_alike(found, expected):
    for row, own in zip(found, expected, strict=True):
        assert_alike(row, own)


@pytest.mark.parametrize("options", STRATEGIES)
def test_answers_are_those_of_batches_and_of_prompts_alone(model, options):
    contexts, seeds = random_contexts(9, 14), range(14)
    alone = BlankGenerator(model, SPECIAL, max_len=7, **options)
    expected = [alone.fill_ids([context], [seed])[0] for context, seed in zip(contexts, seeds, strict=True)]
    for batch_size in (1, 2, 5, 100):
        flying = BlankGenerator(model, SPECIAL, max_len=7, batch_size=batch_size, **options)
        assert_all_alike(flying.fill_ids(contexts, seeds), expected)


@pytest.mark.parametrize("is_fused", [False, True])
def test_frames_that_fail_together_are_read_again_one_by_one(is_fused, monkeypatch):
    model, contexts, calls = small_model(), [[7, 3, 8, 4, 9], [10, 11, 3, 3]], []
    language_model = LanguageModel(small_model(seed=3), SPECIAL, 0.5) if is_fused else None
    generator = BlankGenerator(model, SPECIAL, max_len=2, min_len=2, language_model=language_model)
    expected, finish = generator.fill_ids(contexts), model.finish

    def fails_once(hidden):
        calls.append(hidden)
        if len(calls) == 3:  # behind the frame and the step of the first blanks: the frames of the second ones
            raise MemoryError
        return finish(hidden)

    monkeypatch.setattr(model, "finish", fails_once)
    assert_all_alike(generator.fill_ids(contexts), expected)
    assert len(calls) == 6  # two frames, and a step of both


def test_fewer_steps_are_taken_than_batch_after_batch(model, decoders):
    contexts = random_contexts(5, 60)
    generator = BlankGenerator(model, SPECIAL, max_len=20, batch_size=8)
    generator.fill_ids(contexts)
    flying = decoders.pop().num_steps
    for first in range(0, 60, 8):
        generator.fill_ids(contexts[first : first + 8])
    assert flying < 0.8 * sum(decoder.num_steps for decoder in decoders)


def test_every_prompt_is_reported_once(model):
    contexts, reported = random_contexts(6, 25), []
    BlankGenerator(model, SPECIAL, max_len=5, batch_size=4).fill_ids(contexts, progress=reported.append)
    assert sum(reported) == 25


class CountsTokens(Processor):
    """Remembers how many tokens each prompt of its search has; forbids all but the end after three."""

    def __init__(self):
        self.counts = None

    def __call__(self, state, scores):
        num_prompts = scores.size(0)
        self.counts = torch.zeros(num_prompts) if self.counts is None or state.step == 0 else self.counts + 1
        assert len(self.counts) == num_prompts
        assert (self.counts == state.step).all()
        if state.step == 3:
            keep = scores[..., list(state.ends)].clone()
            scores.fill_(float("-inf"))
            scores[..., list(state.ends)] = keep
        return scores

    def keep(self, rows):
        self.counts = self.counts[rows]


def test_what_a_processor_keeps_belongs_to_one_search(model):
    contexts = random_contexts(7, 30)
    options = {"max_len": 6, "processors": [CountsTokens()]}
    found = BlankGenerator(model, SPECIAL, batch_size=5, **options).fill_ids(contexts)
    assert max(len(answer.tokens) for row in found for answer in row) == 3
    for context, row in zip(contexts, found, strict=True):
        assert_alike(row, BlankGenerator(model, SPECIAL, **options).fill_ids([context])[0])


@pytest.mark.parametrize(
    ("options", "width", "read_ahead"),
    [
        ({}, 1, 0),
        ({"beam": 4}, 4, 0),
        ({"search": "diverse_beam", "beam": 4}, 4, 0),
        ({"search": "beam_sampling", "beam": 3}, 3, 0),
        ({"sampling": True, "nbest": 2}, 2, 0),
    ],
)
def test_memory_is_what_the_formula_in_the_docs_says(model, decoders, options, width, read_ahead):
    contexts, max_len = random_contexts(8, 40), 6
    BlankGenerator(model, SPECIAL, max_len=max_len, batch_size=7, **options).fill_ids(contexts)
    settled = max(len(c) + 1 + (sum(t in slow.BLANKS for t in c) - 1) * (max_len + 1) for c in contexts)
    config, (decoder,) = model.config, decoders
    formula = 2 * 4 * config.num_layers * config.hidden_size * 7 * (settled + width * (max_len - 1 + read_ahead))
    assert decoder.num_bytes == formula
    buffers = [part for cache in decoder.caches for part in cache.read(7, decoder.capacity)]
    assert sum(buffer.untyped_storage().nbytes() for buffer in buffers) == formula


def test_reordering_beams_moves_no_keys_and_no_values(model, monkeypatch):
    reordered = []
    reorder = CachedDecoder.reorder

    def recorded(self, sources):
        before = [part.clone() for cache in self.caches for part in cache.read(self.num_rows, self.capacity)]
        reorder(self, sources)
        after = [part for cache in self.caches for part in cache.read(self.num_rows, self.capacity)]
        reordered.append(all(torch.equal(one, other) for one, other in zip(before, after, strict=True)))

    monkeypatch.setattr(CachedDecoder, "reorder", recorded)
    BlankGenerator(model, SPECIAL, max_len=6, beam=4).fill_ids([[7, 8, 3, 9]])
    assert reordered
    assert all(reordered)
