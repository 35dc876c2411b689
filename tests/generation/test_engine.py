"""The engine: who enters when, requests with options of their own side by side, and one that fails fails alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.engine import engine as engines
from ftk.generation.engine.continuation import Continuation, PromptReader
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.engine import Engine
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Request
from ftk.generation.engine.scoring import score
from ftk.generation.processors import Processor, Processors
from ftk.generation.processors.length import MaxLength, MinLength
from ftk.generation.search.base import Fusion
from ftk.generation.search.greedy import GreedySearch as Greedy
from ftk.generation.search.sampling import SamplingSearch as Sampling
from ftk.models import build_model

END = 1
FRAMING = Continuation([END], 64)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [15, 5], [6, 7, 8, 9, 10], [11, 12], [13], [14, 15, 5, 6]]
OPTIONS = [
    {},
    {"beam": 3, "nbest": 2},
    {"sampling": True, "top_k": 8},
    {"max_len": 4},
    {"beam": 2, "length_penalty": 0.5},
    {"sampling": True, "nbest": 3},
    {"min_len": 3},
    {"search": "diverse_beam", "beam": 4},
]


def causal_model(seed=0):
    """A random GPT-2 whose distributions are far from flat."""
    shape = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "max_positions": 64, "vocab_size": 20}
    torch.manual_seed(seed)
    model = build_model("gpt2", **shape).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0 if "embedding" in name else 6.0)
    return model


@pytest.fixture(scope="module")
def model():
    return causal_model()


def request(prompt, processors=(), seed=1, stream=False, **options):
    own = processors if isinstance(processors, Processors) else Processors(processors)
    return Request(prompt, GenerationConfig(**{"max_len": 6, **options}), own, seed, stream)


def engine(model, num_rows=4, width=4, **options):
    return Engine(CachedDecoder(model, num_rows, width, 16, 40), FRAMING, **options)


def drained(engine):
    """What is left of the work: number of a request -> its events."""
    found = {}
    while engine.is_busy:
        for event in engine.step():
            found.setdefault(event.request, []).append(event)
    return found


def assert_alike(answer, expected):
    for one, other in zip((answer, *answer.others), (expected, *expected.others), strict=True):
        assert one.tokens == other.tokens
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-5)
        assert one.score == pytest.approx(other.score, abs=1e-5)


def alone(model, one):
    ((answer,),) = engine_for(model, FRAMING, [one], 1).answers([one])
    return answer


def slow_greedy(model, prompt, max_len):
    """Tokens and log-probabilities with the end, the whole text being read for each."""
    tokens, logprobs = [], []
    while len(logprobs) < max_len and tokens[-1:] != [END]:
        own = logprobs_behind(model, prompt, tokens)[-1]
        tokens.append(int(own.argmax()))
        logprobs.append(float(own.max()))
    return tokens, logprobs


def logprobs_behind(model, prompt, written):
    """log P of each token behind a prompt and what is written, [len(written) + 1, V]."""
    with torch.no_grad():
        return model(torch.tensor([[*prompt, *written]]))[0].log_softmax(-1)[len(prompt) - 1 :]


def test_a_causal_model_goes_on_as_if_all_were_read_for_each_token(model):
    requests = [request(prompt) for prompt in PROMPTS]
    for prompt, (answer,) in zip(PROMPTS, engine_for(model, FRAMING, requests, 3).answers(requests), strict=True):
        tokens, logprobs = slow_greedy(model, prompt, 6)
        assert answer.tokens + [END] * answer.ended == tokens
        assert answer.token_logprobs == pytest.approx(logprobs, abs=1e-4)


def test_requests_with_other_options_run_side_by_side_as_they_would_alone(model):
    requests = [request(prompt, seed=n, **own) for n, (prompt, own) in enumerate(zip(PROMPTS, OPTIONS, strict=True))]
    together = engine(model)
    numbers = [together.submit(one) for one in requests]
    found = drained(together)
    for number, one in zip(numbers, requests, strict=True):
        *_, answered, done = found[number]
        assert (answered.kind, done.kind) == ("answer", "done")
        assert_alike(answered.answer, alone(model, one))


def test_a_lone_arrival_enters_at_once_and_a_patient_engine_waits_for_company(model):
    for patience, expected in ((0, 1), (10**6, 1)):  # all that wait can enter: nobody waits
        busy = engine(model, enter_after_steps=patience)
        busy.submit(request(PROMPTS[0], min_len=30, max_len=30))
        for _ in range(5):
            busy.step()
        arrived = busy.submit(request(PROMPTS[1], stream=True))
        steps = next(n for n in range(1, 40) if any(event.request == arrived for event in busy.step()))
        assert steps == expected
    for patience, expected in ((0, 4), (7, 11)):
        crowded = engine(model, num_rows=8, enter_after_steps=patience)
        for prompt in PROMPTS[:7]:
            crowded.submit(request(prompt, min_len=30, max_len=30))
        crowded.submit(request(PROMPTS[7], min_len=3, max_len=3))
        arrived = [crowded.submit(request(prompt, stream=True)) for prompt in PROMPTS[:2]]
        steps = next(n for n in range(1, 60) if any(event.request in arrived for event in crowded.step()))
        assert steps == expected  # a row is free behind the third step, for one of the two that wait


def test_prompts_of_many_tokens_enter_in_several_reads_with_a_step_between_any_two(model, monkeypatch):
    requests = [request([5 + n] * length, seed=n) for n, length in enumerate((3, 4, 9, 2, 2, 2, 5, 3))]
    small = engine(model, num_rows=8, read_at_once=7)
    log: list[list[int]] = []
    read, step = small.decoder.read, small.decoder.step
    monkeypatch.setattr(
        small.decoder,
        "read",
        lambda rows, frames, *more: (log.append([len(one.tokens) for one in frames]), read(rows, frames, *more))[1],
    )
    monkeypatch.setattr(small.decoder, "step", lambda tokens: (log.append([]), step(tokens))[1])
    numbers = [small.submit(one) for one in requests]
    found = drained(small)
    assert log[:9] == [[3, 4], [], [9], [], [2, 2, 2], [], [5], [], [3]]
    for number, one in zip(numbers, requests, strict=True):
        assert_alike(found[number][-2].answer, alone(model, one))


class Raises(Processor):
    """Fails where the answer has some tokens."""

    def __init__(self, step):
        self.step = step

    def __call__(self, state, scores):
        scores[:] = 0.0
        if state.step == self.step:
            raise ValueError("of a processor")
        return state.fresh_scores()


@pytest.mark.parametrize("options", [{}, {"beam": 2}, {"sampling": True}])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_processor_that_raises_ends_its_request_and_no_other(model, step, options, is_shared):
    class Sometimes(Raises):
        def __call__(self, state, scores):
            if any(context == PROMPTS[2] for context in state.contexts):
                return super().__call__(state, scores)
            return scores

    shared = [Sometimes(step), MinLength([4])]
    requests = [request(p, shared if is_shared else [Sometimes(step), MinLength([4])], **options) for p in PROMPTS[:4]]
    if is_shared:
        for one in requests:
            one.processors = requests[0].processors
    together = engine(model)
    numbers = [together.submit(one) for one in requests]
    found = drained(together)
    for number, prompt in zip(numbers, PROMPTS, strict=False):
        last = found[number][-1]
        if prompt == PROMPTS[2]:
            assert (last.kind, str(last.error)) == ("error", "of a processor")
        else:
            assert last.kind == "done"
            assert_alike(found[number][-2].answer, alone(model, request(prompt, [MinLength([4])], **options)))
    again = together.submit(request(PROMPTS[2]))
    assert_alike(drained(together)[again][-2].answer, alone(model, request(PROMPTS[2])))
    with pytest.raises(ValueError, match="of a processor"):
        engine_for(model, FRAMING, requests, 4).answers(requests)


class Stateful(Processor):
    """Fails in one of its methods; the base of those that keep something about hypotheses."""

    def __init__(self, method):
        self.method = method

    def __call__(self, state, scores):
        return scores[:, 0] if self.method == "shape" else scores.double() if self.method == "dtype" else scores

    def _called(self, method, result=None):
        if method == self.method:
            raise ValueError("of a processor")
        return result

    def __deepcopy__(self, memo):
        return self._called("copy", self)

    def reorder(self, sources):
        self._called("reorder")

    def keep(self, rows):
        self._called("keep")

    def select(self, totals, width, count):
        return self._called("select", [[0, 1]] * 9 if self.method == "choices" else None)


@pytest.mark.parametrize("method", ["copy", "shape", "dtype", "reorder", "keep", "select", "choices"])
def test_whatever_fails_of_a_requests_own_processors_ends_no_other(model, method):
    # The last one's answer is complete first, which makes the others `keep`.
    lengths = [6, 6, 6, 2]
    together = engine(model)
    own = [[MinLength([n]), MaxLength([n]), *([Stateful(method)] * (place == 1))] for place, n in enumerate(lengths)]
    numbers = [together.submit(request(p, one, beam=2)) for p, one in zip(PROMPTS, own, strict=False)]
    found = drained(together)
    assert [found[number][-1].kind for number in numbers] == ["done", "error", "done", "done"]
    for place in (0, 2, 3):
        assert_alike(found[numbers[place]][-2].answer, alone(model, request(PROMPTS[place], own[place], beam=2)))


class FailsAt(Continuation):
    """A framing that fails when it is asked what follows the answer to a prompt."""

    prompt = None

    def next(self, request, answers):
        if request.prompt == self.prompt:
            raise ValueError("of a framing")
        return super().next(request, answers)


class CannotRead(CachedDecoder):
    prompt = None

    def read(self, rows, frames, *others):
        logits = super().read(rows, frames, *others)
        if any(frame.tokens == self.prompt for frame in frames):
            raise ValueError("of a decoder")
        return logits


@pytest.mark.parametrize("part", ["framing", "decoder"])
def test_a_request_that_cannot_be_read_leaves_its_row_and_the_others_begin(model, part):
    framing, decoder = FailsAt([END], 64), CannotRead(model, 4, 4, 16, 40)
    (framing if part == "framing" else decoder).prompt = PROMPTS[2]
    together = Engine(decoder, framing)
    requests = [request(prompt, **options) for prompt, options in zip(PROMPTS, OPTIONS, strict=True)]
    numbers = [together.submit(one) for one in requests]
    found = drained(together)
    assert [event.kind for event in found[numbers[2]]] == ["error"]
    assert str(found[numbers[2]][0].error) == f"of a {part}"
    for number, one in [pair for pair in zip(numbers, requests, strict=True) if pair[0] != numbers[2]]:
        assert_alike(found[number][-2].answer, alone(model, one))
    assert sorted(together._free) == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["__init__", "_advance", "newest", "finished", "answers", "keep"])
def test_a_search_that_raises_ends_its_group_and_no_other(model, method, monkeypatch):
    def raises(self, *args, **options):
        raise ValueError("of a search")

    together = engine(model)
    lengths = [6, 6, 6, 2]
    requests = [
        request(prompt, [MinLength([n]), MaxLength([n])], sampling=place > 0, stream=True)
        for place, (prompt, n) in enumerate(zip(PROMPTS, lengths, strict=False))
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Sampling, method, raises)
        numbers = [together.submit(one) for one in requests]
        found = drained(together)
    early = "done" if method == "keep" else "error"  # it is complete before the others are to be kept
    assert [found[number][-1].kind for number in numbers] == ["done", "error", "error", early]
    assert [sum(event.kind in ("done", "error") for event in found[number]) for number in numbers] == [1] * 4
    assert_alike(found[numbers[0]][-2].answer, alone(model, requests[0]))
    again = [together.submit(one) for one in requests]
    found = drained(together)
    for number, one in zip(again, requests, strict=True):
        assert_alike(found[number][-2].answer, alone(model, one))


def test_a_step_that_raises_ends_what_is_being_written_and_the_rest_is_answered(model):
    class FailsOnce(CachedDecoder):
        calls = 0

        def step(self, tokens):
            self.calls += 1
            if self.calls == 3:
                raise MemoryError("of a step")
            return super().step(tokens)

    together = Engine(FailsOnce(model, 2, 1, 16, 40), FRAMING)
    numbers = [together.submit(request(prompt, min_len=6)) for prompt in PROMPTS[:4]]
    found = drained(together)
    assert [found[number][-1].kind for number in numbers] == ["error", "error", "done", "done"]
    for number, prompt in zip(numbers[2:], PROMPTS[2:], strict=False):
        assert_alike(found[number][-2].answer, alone(model, request(prompt, min_len=6)))


def test_all_groups_have_their_work_before_one_is_waited_for(model, monkeypatch):
    order = []
    for search in (Greedy, Sampling):
        for method in ("advance", "finished"):
            work = getattr(search, method)

            def noted(self, *args, work=work, method=method):
                order.append(method)
                return work(self, *args)

            monkeypatch.setattr(search, method, noted)
    together = engine(model)
    for prompt, sampling in zip(PROMPTS[:2], (False, True), strict=True):
        together.submit(request(prompt, sampling=sampling, min_len=4))
    for _ in range(3):
        together.step()
    assert order == ["advance", "advance", "finished", "finished"] * 3


def test_an_engine_forgets_options_and_takes_those_that_are_lists(model, monkeypatch):
    @dataclass(kw_only=True)
    class Listed(GenerationConfig):
        names: list[str] = field(default_factory=list)

    monkeypatch.setattr(engines, "MAX_STRATEGIES", 3)
    together = engine(model)
    for max_len in range(1, 8):
        together.submit(request([5], max_len=max_len))
    for prompt in PROMPTS[:2]:
        together.submit(Request(prompt, Listed(max_len=5, names=["a"])))
    assert len(together._strategies) == 3
    assert {events[-1].kind for events in drained(together).values()} == {"done"}


def test_requests_that_are_refused_leave_nothing_of_those_before_them(model):
    together = engine(model)
    with pytest.raises(UserError, match="the prompt is empty"):
        together.answers([request([5]), request([])])
    assert not together.is_busy


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_not_finite_end_their_request_and_spoil_no_row(stream):
    broken = causal_model(seed=1)
    with torch.no_grad():
        broken.token_embedding.weight[17] = float("nan")  # read in one prompt
    broken.head = torch.nn.Linear(16, 17, bias=False)  # and never written
    together = engine(broken, num_rows=2)
    # The third takes the row of the first, beside one that is longer: what was left there is looked at, and masked.
    prompts = [[5, 17, 6, 7], [7, 8, 9, 10], [5], [11, 12, 13, 14, 15]]
    numbers = [together.submit(request(prompt, min_len=6, stream=stream)) for prompt in prompts]
    found = drained(together)
    assert [found[number][-1].kind for number in numbers] == ["error", "done", "done", "done"]
    assert "not finite" in str(found[numbers[0]][-1].error)
    for number, prompt in zip(numbers[1:], prompts[1:], strict=True):
        assert_alike(found[number][-2].answer, alone(broken, request(prompt, min_len=6)))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_what_is_cancelled_leaves_its_row_to_others(model, steps):
    together = engine(model, num_rows=2)
    first, second, third = (together.submit(request(p, min_len=6, stream=True)) for p in PROMPTS[:3])
    for _ in range(steps):
        together.step()
    together.cancel(first)
    together.cancel(99)
    found = drained(together)
    assert first not in found
    assert_alike(found[second][-2].answer, alone(model, request(PROMPTS[1], min_len=6)))
    assert_alike(found[third][-2].answer, alone(model, request(PROMPTS[2], min_len=6)))


def test_tokens_are_reported_before_the_answer_where_they_are_settled(model):
    together = engine(model)
    number = together.submit(request(PROMPTS[0], stream=True, min_len=6))
    silent = together.submit(request(PROMPTS[1]))
    found = drained(together)
    assert [event.kind for event in found[number]] == [*["token"] * 6, "answer", "done"]
    tokens = [token for event in found[number] for token in event.tokens]
    assert tokens == found[number][-2].answer.tokens
    assert [event.kind for event in found[silent]] == ["answer", "done"]


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (request([5], beam=5), "beam is 5, but the engine was made for 4 hypotheses; lower beam"),
        (request([5], sampling=True, nbest=6), "nbest is 6, but the engine was made for 4 hypotheses; lower nbest"),
        (request([5], max_len=42), "max_len is 42, but the engine was made for answers of 41 tokens"),
        (request([5] * 17), "takes 17 places, but the engine was made for 16; shorten it"),
        (request([5] * 60), r"does not fit the model's 64 positions; shorten it, or lower max_len to 5 or less"),
        (request([]), "the prompt is empty"),
        (request([5, 20]), "20 is no id of the model's 20 tokens"),
        (request([-1]), "-1 is no id of the model's 20 tokens"),
    ],
)
def test_what_an_engine_is_too_small_for_is_refused_by_name(model, one, message):
    with pytest.raises(UserError, match=message):
        engine(model).submit(one)


def test_caches_that_do_not_fit_are_refused_when_they_are_made(model):
    with pytest.raises(UserError, match="keys and values of 1099511627776 prompts .* lower batch_size, max_len or"):
        CachedDecoder(model, 2**40, 4, 16, 40)
    decoder = CachedDecoder(model, 4, 4, 16, 40)
    assert decoder.num_bytes == 2 * 4 * 2 * 16 * 4 * (16 + 4 * 40)  # before any frame was read


class Biased(NamedTuple):
    attend: Any
    bias: Any

    def __call__(self, query, key, value, *, bias=None, scale=None):
        return self.attend(query, key, value, bias=self.bias, scale=scale)


@pytest.mark.parametrize("options", [{}, {"beam": 3, "nbest": 3}])
def test_a_model_with_a_bias_of_distances_goes_on_as_if_all_were_read_for_each_token(monkeypatch, options):
    """Heads that see what is near, and what is far (Press et al. 2022 with both signs)."""

    def around(position_ids, key_positions=None):
        keys = position_ids if key_positions is None else key_positions
        distances = (position_ids[:, None, :, None] - keys[:, None, None, :]).abs()  # [B, 1, T, S]
        bias = distances * torch.tensor([-0.5, 0.5])[None, :, None, None]
        return lambda attend: Biased(attend, bias)

    model = causal_model(3)
    plain = [alone(model, request(prompt, **options)).tokens for prompt in PROMPTS]
    monkeypatch.setattr(model, "around", around)
    requests = [request(prompt, **options) for prompt in PROMPTS]
    found = engine_for(model, FRAMING, requests, 3).answers(requests)
    assert [answer.tokens for (answer,) in found] != plain
    for prompt, (answer,) in zip(PROMPTS, found, strict=True):
        for one in (answer, *answer.others):
            written = [*one.tokens, *[END] * one.ended]
            expected = logprobs_behind(model, prompt, written)[range(len(written)), written]
            assert one.token_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        if not options:
            assert [*answer.tokens, *[END] * answer.ended] == slow_greedy(model, prompt, 6)[0]


def test_given_continuations_score_as_a_slow_forward_says(model):
    continuations = [[[7, 8, END], [9], [10, 11, 12, 13]], [[5, 6]], [], [[END]]]
    found = score(model, FRAMING, [request(prompt) for prompt in PROMPTS[:4]], continuations)
    for prompt, own, scored in zip(PROMPTS, continuations, found, strict=False):
        for ids, one in zip(own, scored, strict=True):
            logprobs = logprobs_behind(model, prompt, ids)[:-1]
            expected = logprobs[range(len(ids)), ids]
            assert one.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
            assert one.best == pytest.approx(logprobs.amax(-1).tolist(), abs=1e-4)
    greedy, _ = slow_greedy(model, PROMPTS[0], 4)
    ((best, other),) = engine(model).score([request(PROMPTS[0])], [[greedy, [greedy[0] + 1]]])
    assert (best.is_greedy, other.is_greedy) == (True, False)


@pytest.mark.parametrize(
    ("prompt", "continuation", "message"),
    [
        ([5, 20], [6], "20 is no id of the model's 20 tokens"),
        ([5], [20], "20 is no id"),
        ([5], [6, -1], "-1 is no id"),
        ([5] * 60, [6] * 6, "prompt and answer take 65 positions, but the model has 64; shorten them"),
        ([], [6], "the prompt is empty"),
    ],
)
def test_continuations_that_cannot_be_read_are_refused(model, prompt, continuation, message):
    with pytest.raises(UserError, match=message):
        engine(model).score([request(prompt)], [[continuation]])


def test_a_language_model_reads_the_prompt_too(model):
    other = causal_model(seed=5)
    fused = engine_for(model, FRAMING, [request(PROMPTS[0])], 1, PromptReader(other, FRAMING, Fusion(0.7)))
    ((answer,),) = fused.answers([request(PROMPTS[0])])
    written = answer.tokens + [END] * answer.ended
    for step, token in enumerate(written):
        own, its = (logprobs_behind(one, PROMPTS[0], written[:step])[-1] for one in (model, other))
        assert token == int((own + 0.7 * its).argmax())
        assert answer.lm_logprobs[step] == pytest.approx(float(its[token]), abs=1e-4)


def test_a_vocabulary_without_an_end_is_refused():
    with pytest.raises(UserError, match="no token that ends a text"):
        Continuation([])
