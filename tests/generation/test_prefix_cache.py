"""What rows hold of earlier requests is not read again, and changes no answer."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from ftk.generation.engine import prefix_cache, scoring
from ftk.generation.engine.adapted import AdaptedDecoder
from ftk.generation.engine.continuation import Continuation, OneAnswer, PromptReader
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.engine import Engine
from ftk.generation.engine.fusion import FusedDecoder
from ftk.generation.engine.request import Frame
from ftk.generation.search.base import Fusion
from ftk.modules.adapters import LoRAConfig, PrefixConfig
from ftk.modules.adapters.adapt import adapt, linear_layers
from ftk.modules.adapters.lora import LoRA
from ftk.modules.adapters.prefix import PrefixTuning
from ftk.modules.adapters.side_by_side import choice_of, put_side_by_side
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
    monkeypatch.setattr(prefix_cache, "MIN_SHARED_TOKENS", 2)
    monkeypatch.setattr(scoring, "MIN_SHARED_TOKENS", 2)


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


@pytest.mark.parametrize("num_talks", [1, 2, 4])
def test_the_turns_of_as_many_conversations_as_rows_are_read_once(num_talks):
    model = causal_model()
    lasting, sizes = engine(model, num_rows=4), []
    talks = [texts(number, 6) for number in range(num_talks)]
    for turn in range(3):
        for talk in talks:
            asked = request(list(talk), min_len=5)
            answer, num_read = answered(lasting, asked)
            assert_alike([answer], [answered(engine(model), asked)[0]])
            sizes.append(num_read)
            talk += [*answer.tokens, *texts(10 + turn, 3)]
    # The last token of an answer of the greatest length was never read.
    assert sizes == [*[6] * num_talks, *[1 + 3] * 2 * num_talks]


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


@pytest.mark.parametrize("when", ["at the same time", "while it is written", "after it has failed", "after its end"])
def test_what_is_not_finite_is_not_taken_over(when, monkeypatch):
    """It spoils all tokens of its frame: their attention to it has weight 0, and 0 NaN is NaN."""
    model, lead = causal_model(), texts(4, 12)
    embed, asked = model.embed, request([*lead, 5])
    expected = answered(engine(model), asked)[0]
    monkeypatch.setattr(
        model, "embed", lambda tokens, **more: embed(tokens, **more).masked_fill((tokens == 1)[..., None], float("nan"))
    )
    lasting = engine(model)
    bad = lasting.submit(request([*lead, END, *texts(6, 8)]))
    if when != "at the same time":
        lasting.step()
    if when == "after its end":
        lasting.cancel(bad)
    elif when == "after it has failed":
        assert drained(lasting)[bad][-1].kind == "error"
    for _ in range(3):
        number = lasting.submit(asked)
        lasting.submit(request(texts(7, 24)))  # steps look at as many slots of each row as the longest has
        found = drained(lasting)
        assert_alike([found[number][-2].answer], [expected])


class Talk(OneAnswer):
    """Prompts are lists of texts, with an answer behind each; a text that begins with 3 is read anew with all before.

    Of a prompt that begins with 2 all tokens see all of its first text.
    """

    def check(self, request):
        pass

    def room(self, request):
        return None

    def slots(self, request):
        return sum(map(len, request.prompt)) + (len(request.prompt) - 1) * request.options.max_len

    def first(self, request):
        prompt = request.prompt[0]
        return frame(prompt, 0, prefix=len(prompt) if prompt[0] == 2 else 0)

    def next(self, request, answers):
        number = len(answers)
        if number == len(request.prompt):
            return None
        said = [*request.prompt[0]]
        for answer, text in zip(answers, request.prompt[1:], strict=False):
            start = len(said)
            said += [*answer.tokens, *text]
        if request.prompt[number][0] == 3:
            return frame(said, 0, number=number)
        return frame(said[start:], start, number=number, restart=False)


def frame(tokens, start, **more):
    positions = {"position_ids": np.arange(start, start + len(tokens))}
    return Frame(tokens, positions, {"position_ids": np.array(1)}, context=tokens, **more)


def decoder_of(kind, model, num_rows, width):
    shape = num_rows, width, 60, 8
    if kind == "adapters":
        return AdaptedDecoder(choice_of(model), model, *shape)
    own = CachedDecoder(model, *shape)
    if kind != "fused":
        return own
    other = causal_model(5)
    return FusedDecoder(own, CachedDecoder(other, *shape), PromptReader(other, Continuation([END], 64), Fusion(0.5)))


def with_adapters(model):
    """Two with random weights, side by side."""
    generator, made = torch.Generator().manual_seed(0), {}
    for name in ("one", "two"):
        layers = {key: layer for key, layer in linear_layers(model).items() if key.startswith("layers")}
        tensors = {}
        for key, layer in layers.items():
            tensors[f"{key}.lora_A.weight"] = torch.randn(2, layer.in_features, generator=generator)
            tensors[f"{key}.lora_B.weight"] = torch.randn(layer.out_features, 2, generator=generator)
        made[name] = (LoRA(LoRAConfig(lora_rank=2, lora_alpha=4.0, adapter_targets=[*layers])), tensors)
    put_side_by_side(model, made)
    return model.eval()


def assert_kept_as_read_anew(decoder):
    """What rows hold is what a decoder of its own gives; others' steps write behind it."""
    for own in [decoder] if isinstance(decoder, CachedDecoder) else [decoder.decoder, decoder.other]:
        for row in range(own.num_rows):
            text = own.prefix_cache[row]
            if text is None:
                continue
            length = len(text.tokens)
            assert own.prefix_lengths[row] >= length
            fresh = CachedDecoder(own.model, 1, 1, length, 0)
            if isinstance(own, AdaptedDecoder):
                own.choice.take([text.reader], own.device)
            with torch.inference_mode():
                fresh.read([0], [Frame(text.tokens, text.inputs, {"position_ids": np.array(1)})])
            for cache, other in zip(own.caches, fresh.caches, strict=True):
                for part, expected in zip(cache.row(row, length), other.row(0, length), strict=True):
                    torch.testing.assert_close(part, expected, rtol=1e-3, atol=1e-3)


def test_a_row_that_is_full_is_not_written_beyond_its_end():
    model = causal_model()
    lasting = Engine(CachedDecoder(model, 8, 1, 48, 8), Continuation([END], 64), enter_after_steps=64)
    longest = {"max_len": 9, "min_len": 9}
    lasting.submit(request(texts(1, 48), **longest))
    for _ in range(4):
        lasting.step()
    # One of eight rows is free when the first answer is complete; the two that wait do so until another one is.
    others = {lasting.submit(asked): asked for asked in (request(texts(seed, 9), **longest) for seed in range(2, 11))}
    while lasting.decoder.live[0]:
        lasting.step()
    lasting.step()
    lasting.step()
    assert lasting.num_waiting == 2
    assert_kept_as_read_anew(lasting.decoder)
    found = drained(lasting)
    for number, asked in others.items():
        assert_alike([found[number][-2].answer], [answered(engine(model), asked)[0]])


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind", ["fused", "adapters", "several answers"])
def test_rows_hold_what_they_say_in_every_decoder_and_answers_are_those_of_fresh_ones(kind, width):
    model, rng = causal_model(), random.Random(width)
    if kind == "adapters":
        with_adapters(model)
    framing = Talk([END], 64) if kind == "several answers" else Continuation([END], 64)
    lasting, pool, expected, found = Engine(decoder_of(kind, model, 3, width), framing), [texts(5, 8)], {}, {}
    options, cancelled = [{}, {"sampling": True, "seed": 3}, *([{"beam": 3}] if width > 1 else [])], set()
    for step in range(110):
        if rng.random() < 0.4:
            begun = rng.choice(pool)
            prompt = [*begun[: rng.randrange(2, len(begun) + 1)], *texts(rng.random(), rng.randrange(1, 5))][:30]
            more = [texts(rng.random(), rng.randrange(1, 4)) for _ in range(rng.randrange(3))]
            asked = request([prompt, *more] if kind == "several answers" else prompt, **rng.choice(options))
            asked.adapter = rng.choice([None, "one", "two"]) if kind == "adapters" else None
            expected[lasting.submit(asked)] = asked
            pool.append(prompt)
        elif rng.random() < 0.1 and expected:
            number = max(expected)
            lasting.cancel(number)
            cancelled.add(number)
        for event in lasting.step():
            found.setdefault(event.request, []).append(event)
        if step % 8 == 0:
            assert_kept_as_read_anew(lasting.decoder)
    for number, events in drained(lasting).items():
        found.setdefault(number, []).extend(events)
    for number, asked in expected.items():
        if number in cancelled:
            continue
        alone = Engine(decoder_of(kind, model, 1, width), framing)
        own = alone.submit(asked)
        answers = [event.answer for event in drained(alone)[own] if event.answer is not None]
        assert_alike([event.answer for event in found[number] if event.answer is not None], answers)


def test_what_a_failed_reading_has_settled_is_read_again(monkeypatch):
    model, lead = causal_model(), texts(3, 12)
    embed, answers = model.embed, {}

    def fails(tokens, **inputs):
        if tokens.size(1) > 1 and (tokens == END).any():
            raise MemoryError
        return embed(tokens, **inputs)

    monkeypatch.setattr(model, "embed", fails)
    for name, others in (("alone", []), ("beside others", [[*lead, 5, 5], [*lead, END, END]])):
        lasting = Engine(CachedDecoder(model, 4, 1, 40, 8), Talk([END], 64))
        talk = lasting.submit(request([texts(1, 5), texts(2, 2)], min_len=4, max_len=4))
        answers[name] = []
        while lasting.is_busy:
            for event in lasting.step():
                if event.request == talk and event.answer is not None:
                    answers[name].append(event.answer)
                    # They enter when the second text is read, and the last one fails.
                    while others:
                        lasting.submit(request([others.pop(0)]))
    assert len(answers["alone"]) == 2
    assert_alike(answers["beside others"], answers["alone"])


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_an_engine_that_has_read_nothing(name, width):
    model, rng = MODELS[name](), random.Random(width)
    lasting, pool, expected, found = engine(model, width=width), [texts(5, 5)], {}, {}
    options = [{}, {"sampling": True, "seed": 3}, {"max_len": 3}, *([{"beam": 3}] if width > 1 else [])]
    cancelled = set()
    while len(expected) < 40:
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
