"""What rows hold of earlier requests is not read again, and changes no answer."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from ftk.generation.engine import kept, scoring
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.engine import Engine
from ftk.modules.adapters import PrefixConfig
from ftk.modules.adapters.adapt import adapt
from ftk.modules.adapters.prefix import PrefixTuning
from tests.generation.test_engine import END, causal_model, drained, request
from tests.generation.test_in_flight import assert_alike
from tests.generation.test_recorded import causal


def prefix_tuned():
    """With keys and values of its own in front of all layers."""
    model = causal_model()
    adapt(model, PrefixTuning(PrefixConfig(num_virtual_tokens=3)))
    return model.eval()


MODELS = {
    "gpt2": causal_model,
    "grouped heads": lambda: causal("llama", num_kv_heads=1),
    "window": lambda: causal("mistral", sliding_window=4),
    "bias": lambda: causal("cpm1"),
    "prefix tuning": prefix_tuned,
}


@pytest.fixture(autouse=True)
def least(monkeypatch):
    """Beginnings of two tokens count already."""
    monkeypatch.setattr(kept, "LEAST", 2)
    monkeypatch.setattr(scoring, "LEAST", 2)


class Counted(CachedDecoder):
    """Counts the tokens that are read in frames."""

    num_read = 0

    def _remember(self, rows, frames):
        self.num_read += sum(len(frame.tokens) for frame in frames)
        super()._remember(rows, frames)


def engine(model, num_rows=3, width=1, sees_prompt=False):
    return Engine(Counted(model, num_rows, width, 48, 8), Continuation([END], 64, sees_prompt=sees_prompt))


def answered(own, asked):
    """The answer of a request that comes alone, and how many tokens were read for it."""
    before, number = own.decoder.num_read, own.submit(asked)
    (answer,) = (event.answer for event in drained(own)[number] if event.answer is not None)
    return answer, own.decoder.num_read - before


def texts(seed, num_tokens):
    return random.Random(seed).choices(range(2, 20), k=num_tokens)


def test_the_turns_of_two_conversations_in_turn_are_read_once():
    model = causal_model()
    lasting, sizes = engine(model), []
    talks = [texts(1, 6), texts(2, 6)]
    for turn in range(3):
        for talk in talks:
            asked = request(list(talk), min_len=5)
            answer, num_read = answered(lasting, asked)
            assert_alike([answer], [answered(engine(model), asked)[0]])
            sizes.append(num_read)
            talk += [*answer.tokens, *texts(10 + turn, 3)]
    # The last token of an answer of the greatest length was never read.
    assert sizes == [6, 6, *[1 + 3] * 4]


def test_the_oldest_is_lost_first():
    model = causal_model()
    lasting = engine(model, num_rows=2)
    first, second, third = (texts(seed, 8) for seed in range(3))
    read = [answered(lasting, request(one))[1] for one in (first, second, first, third, first, second)]
    assert read == [8, 8, 1, 8, 1, 8]


def test_who_moves_to_an_earlier_row_leaves_what_that_held_behind():
    model = causal_model()
    lasting, (first, second, third) = engine(model), (texts(seed, 8) for seed in range(3))
    numbers = [lasting.submit(request(one, max_len=n, min_len=n)) for one, n in ((first, 2), (second, 6))]
    found = drained(lasting)
    assert lasting.decoder.live.tolist() == [0, 0, 0]
    for number, prompt in zip(numbers, (first, second), strict=True):
        # Both can be continued, in whichever rows they lie now.
        prompt += [*found[number][-2].answer.tokens, *third[:2]]
        asked = request(prompt)
        answer, num_read = answered(lasting, asked)
        assert num_read == 3
        assert_alike([answer], [answered(engine(model), asked)[0]])


@pytest.mark.parametrize(
    ("own", "sees_prompt", "num_read"),
    [({}, False, 1), ({"beam": 3}, False, 1), ({}, True, 12)],
    ids=["greedy", "beam", "tokens see what comes later"],
)
def test_who_begins_alike_while_another_writes_takes_over_what_that_has_read(own, sees_prompt, num_read):
    model, prompt = causal_model(), texts(3, 12)
    lasting = engine(model, width=4, sees_prompt=sees_prompt)
    asked = request(prompt, min_len=6, **own)
    first = lasting.submit(asked)
    lasting.step()
    lasting.step()
    second, before = lasting.submit(asked), lasting.decoder.num_read
    found = drained(lasting)
    assert lasting.decoder.num_read - before == num_read
    expected = answered(engine(model, width=4, sees_prompt=sees_prompt), asked)[0]
    for number in (first, second):
        assert_alike([event.answer for event in found[number] if event.answer is not None], [expected])


def test_who_begins_alike_at_the_same_time_reads_after_the_first():
    model, lead = causal_model(), texts(3, 12)
    prompts = [[*lead, *texts(20 + number, 3)] for number in range(3)]
    lasting, numbers = engine(model), []
    for prompt in (prompts[0], texts(4, 5), prompts[1], prompts[2]):
        numbers.append(lasting.submit(request(prompt)))
    found = drained(lasting)
    # The last one enters when a row is free.
    assert lasting.decoder.num_read == 15 + 5 + 3 + 3
    for number, prompt in zip(numbers, (prompts[0], texts(4, 5), prompts[1], prompts[2]), strict=True):
        assert_alike([found[number][-2].answer], [answered(engine(model), request(prompt))[0]])


def test_what_is_not_finite_is_not_taken_over():
    model, prompt = causal_model(), texts(4, 9)
    lasting = engine(model)
    with torch.no_grad():
        kept_weight = model.layers[0].attention.qkv.weight.clone()
        model.layers[0].attention.qkv.weight.fill_(float("nan"))
        number = lasting.submit(request(prompt))
        assert drained(lasting)[number][-1].kind == "error"
        model.layers[0].attention.qkv.weight.copy_(kept_weight)
    answer, num_read = answered(lasting, request(prompt))
    assert num_read == 9
    assert_alike([answer], [answered(engine(model), request(prompt))[0]])


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_an_engine_that_has_read_nothing(name, width):
    model, rng = MODELS[name](), random.Random(width)
    lasting, pool, expected, found = engine(model, width=width), [texts(5, 5)], {}, {}
    options = [{}, {"sampling": True, "seed": 3}, {"max_len": 3}, *([{"beam": 3}] if width > 1 else [])]
    cancelled = set()
    while len(expected) < 60:
        if rng.random() < 0.4:
            # Of what was asked or answered before, with something else behind.
            begun = rng.choice(pool)
            prompt = [*begun[: rng.randrange(2, len(begun) + 1)], *texts(rng.random(), rng.randrange(1, 6))][:40]
            asked = request(prompt, **rng.choice(options))
            number = lasting.submit(asked)
            expected[number] = asked
            pool.append(prompt)
        elif rng.random() < 0.1 and expected:
            lasting.cancel(number)  # which may be waiting, written or done
            cancelled.add(number)
        for event in lasting.step():
            if event.answer is not None:
                found[event.request] = event.answer
                pool.append([*expected[event.request].prompt, *event.answer.tokens])
    found |= {number: events[-2].answer for number, events in drained(lasting).items() if number not in found}
    for number, asked in expected.items():
        if number not in cancelled:
            assert_alike([found[number]], [answered(engine(model, 1, width), asked)[0]])
    assert lasting.decoder.num_read < 0.6 * sum(len(asked.prompt) for asked in expected.values())


@pytest.mark.parametrize("name", MODELS)
def test_continuations_behind_what_many_begin_with_have_the_scores_that_they_have_alone(name, monkeypatch):
    model, rng, read, reported = MODELS[name](), random.Random(7), [], []
    embed = model.embed

    def counted(tokens, **inputs):
        read.append(tokens.numel())
        return embed(tokens, **inputs)

    # Two sets of examples, one of which begins the other; a text that has nothing in common; a prompt that comes again.
    short, long = texts(1, 9), [*texts(1, 9), *texts(2, 10)]
    prompts = [[*rng.choice((short, long)), *texts(100 + number, rng.randrange(6))] for number in range(20)]
    prompts += [texts(3, 12), prompts[0]]
    continuations = [[texts(rng.random(), rng.randrange(5)) for _ in range(rng.randrange(4))] for _ in prompts]
    requests, framing = [request(prompt) for prompt in prompts], Continuation([END], 64)
    monkeypatch.setattr(model, "embed", counted)
    found = scoring.score(model, framing, requests, continuations, reported.append)
    assert sum(reported) == len(prompts)
    num_read = sum(read)
    alone = [scoring.score(model, framing, [one], [own])[0] for one, own in zip(requests, continuations, strict=True)]
    assert num_read < 0.7 * (sum(read) - num_read)
    for one, other in zip(itertools.chain(*found), itertools.chain(*alone), strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=2e-5)
        assert one.likeliest == other.likeliest
        assert one.is_greedy == other.is_greedy
