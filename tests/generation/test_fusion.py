"""A language model's part in the choice of tokens equals a slow sum of two uncached models."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.continuation import Continuation, PromptReader
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Request
from ftk.generation.ensemble import Ensemble
from ftk.generation.processors.base import Processor
from ftk.generation.processors.prefix import AllowedTokens
from ftk.generation.search.base import Fusion
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.tasks.glm_blank import BlankGenerator
from ftk.tasks.glm_blank.infill.blanks import blank_numbers
from ftk.tasks.glm_blank.infill.language_model import LanguageModel
from tests.generation.slow import BLANKS, SPECIAL, next_logprobs, small_model, steps_of
from tests.generation.test_ensemble import spread
from tests.generation.test_in_flight import STRATEGIES
from tests.tasks.glm_blank.infill.test_generator import random_contexts
from tests.tasks.glm_blank.infill.test_orders import CONTEXTS

WEIGHT = 0.7


@pytest.fixture(scope="module")
def model():
    return small_model(seed=1)


@pytest.fixture(scope="module")
def other():
    """A language model of another shape."""
    return small_model(seed=7, hidden_size=24, num_layers=1, num_attention_heads=3, max_positions=48)


def generator(model, other, weight=WEIGHT, special=SPECIAL, **options):
    return BlankGenerator(model, special, language_model=LanguageModel(other, special, weight), **options)


def language_logprobs(model, context, filled, blank, answer, mask=SPECIAL.gmask, limit=None):
    """log P_lm(next token), [V], after the text left of the blank, a mask, and the answer so far."""
    answers = dict(filled)
    left = [one for place in range(blank) for one in answers.get(place, [context[place]])]
    left = left[-limit:] if limit is not None else left
    return next_logprobs(model, [*left, mask], [], len(left), answer)


def slow_greedy(model, other, context, order, max_len, reencode=False):
    """Per blank, from left to right: tokens, both models' log-probabilities."""
    places = dict(enumerate(index for index, token in enumerate(context) if token in BLANKS))
    filled, found = [], {}
    for number in order:
        place, answer, own, language = places.pop(number), [], [], []
        while len(own) < max_len:
            given = (context, filled, place, answer)
            mine, its = next_logprobs(model, *given), language_logprobs(other, *given)
            token = int((mine + WEIGHT * its).argmax())
            own.append(float(mine[token]))
            language.append(float(its[token]))
            if token == SPECIAL.eop:
                break
            answer.append(token)
        found[number] = answer, own, language
        if reencode:
            context = context[:place] + answer + context[place + 1 :]
            places = {n: at + (len(answer) - 1) * (at > place) for n, at in places.items()}
        else:
            filled.append((place, answer))
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("options", [{}, {"blank_order": "3,1"}, {"reencode": True}, {"batch_size": 2}])
@pytest.mark.parametrize("block_positions", [True, False])
def test_greedy_equals_the_slow_sum(block_positions, options):
    model, other = (small_model(seed=seed, block_positions=block_positions) for seed in (1, 7))
    changed = False
    fused = generator(model, other, max_len=4, **options).fill_ids(CONTEXTS)
    plain = BlankGenerator(model, SPECIAL, max_len=4, **options).fill_ids(CONTEXTS)
    for context, answers, without in zip(CONTEXTS, fused, plain, strict=True):
        order = blank_numbers(options.get("blank_order", "left"), sum(token in BLANKS for token in context))
        expected = slow_greedy(model, other, context, order, 4, options.get("reencode", False))
        assert [answer.tokens for answer in answers] == [tokens for tokens, _, _ in expected]
        for answer, (_, own, language) in zip(answers, expected, strict=True):
            assert answer.token_logprobs == pytest.approx(own, abs=3e-5)
            assert answer.lm_logprobs == pytest.approx(language, abs=3e-5)
        changed |= [answer.tokens for answer in answers] != [answer.tokens for answer in without]
    assert changed  # or the comparison would say little


@pytest.mark.parametrize("options", STRATEGIES)
def test_without_weight_the_answers_are_those_of_the_model_to_the_last_bit(model, other, options):
    contexts = random_contexts(3, 12)
    plain = BlankGenerator(model, SPECIAL, max_len=5, batch_size=5, alternatives=2, **options).fill_ids(contexts)
    fused = generator(model, other, 0.0, max_len=5, batch_size=5, alternatives=2, **options).fill_ids(contexts)
    for answers, expected in zip(fused, plain, strict=True):
        for answer in answers:
            assert all(len(one.lm_logprobs) == len(one.token_logprobs) for one in (answer, *answer.others))
        bare = [
            replace(one, lm_logprobs=(), others=tuple(replace(other, lm_logprobs=()) for other in one.others))
            for one in answers
        ]
        assert bare == expected


@pytest.mark.parametrize("options", STRATEGIES)
def test_both_parts_of_every_strategy_are_those_of_the_models(model, other, options):
    contexts = random_contexts(4, 7)
    found = generator(model, other, max_len=5, batch_size=4, **options).fill_ids(contexts)
    for context, answers in zip(contexts, found, strict=True):
        for one, step, token, read in steps_of(context, answers):
            own, language = next_logprobs(model, *read)[token], language_logprobs(other, *read)[token]
            assert one.token_logprobs[step] == pytest.approx(float(own), abs=5e-5)
            assert one.lm_logprobs[step] == pytest.approx(float(language), abs=5e-5)
            if options.get("search") not in ("diverse_beam", "beam_sampling") and "top_p" not in options:
                total = sum(one.token_logprobs) + WEIGHT * sum(one.lm_logprobs)
                penalty = options.get("length_penalty", 1.0)
                assert one.score == pytest.approx(total / len(one.token_logprobs) ** penalty, abs=5e-5)


def test_a_language_model_that_does_not_know_the_end_has_a_say_in_words_alone():
    torch.manual_seed(0)
    logprobs, language = torch.randn(2, 3, 9).log_softmax(-1), (3 * torch.randn(2, 3, 9)).log_softmax(-1)
    ends = torch.tensor([2, 5])
    words = [0, 1, 3, 4, 6, 7, 8]
    fused = Fusion(0.7, ends=False).scores(logprobs, language, ends).log_softmax(-1)
    torch.testing.assert_close(fused[..., ends], logprobs[..., ends])
    both = Fusion(0.7).scores(logprobs, language, ends)
    torch.testing.assert_close(both, logprobs + 0.7 * language)
    torch.testing.assert_close(fused[..., words].log_softmax(-1), both[..., words].log_softmax(-1))
    sure = torch.full((9,), float("-inf")).index_fill(0, torch.tensor(2), 0.0)  # nothing but the end
    assert Fusion(0.7, ends=False).scores(sure, language[0, 0], ends)[2] == 0.0


def test_answers_end_where_the_model_says(model, other):
    with torch.no_grad():
        never_ends = copy.deepcopy(other)
        never_ends.token_embedding.weight[SPECIAL.eop] = 0.0
    contexts, options = random_contexts(8, 20), {"max_len": 6, "sampling": True}

    def num_ended(ends):
        language_model = LanguageModel(never_ends, SPECIAL, 3.0, ends=ends)
        found = BlankGenerator(model, SPECIAL, language_model=language_model, **options).fill_ids(contexts)
        return sum(answer.ended for answers in found for answer in answers)

    alone = BlankGenerator(model, SPECIAL, **options).fill_ids(contexts)
    assert num_ended(True) < 0.5 * sum(answer.ended for answers in alone for answer in answers)
    assert num_ended(False) > 0.5 * sum(answer.ended for answers in alone for answer in answers)


def test_ensembles_on_both_sides(model, other):
    second, third = small_model(seed=3), small_model(seed=4)
    contexts = random_contexts(7, 6)
    found = generator(Ensemble([model, second]), Ensemble([third, model]), max_len=5, beam=3).fill_ids(contexts)

    def mean(models, function, *given):
        return torch.stack([function(one, *given) for one in models]).exp().mean(0).log()

    for context, answers in zip(contexts, found, strict=True):
        for one, step, token, read in steps_of(context, answers):
            own = mean([model, second], next_logprobs, *read)[token]
            language = mean([third, model], language_logprobs, *read)[token]
            assert one.token_logprobs[step] == pytest.approx(float(own), abs=5e-5)
            assert one.lm_logprobs[step] == pytest.approx(float(language), abs=5e-5)


def test_a_text_that_is_too_long_is_cut_at_its_left(model):
    other = small_model(seed=7, max_positions=7)  # 8 rows: 7 tokens of text and the blank
    context = [6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 4, 16]
    (answers,) = generator(model, other, max_len=5).fill_ids([context])
    for answer, step, token, read in steps_of(context, answers):
        expected = language_logprobs(other, *read, limit=7)[token]
        assert answer.lm_logprobs[step] == pytest.approx(float(expected), abs=3e-5)
    special = SimpleNamespace(**vars(SPECIAL), cls=6)
    ((answer,),) = generator(model, other, special=special, max_len=5).fill_ids([context])
    without = [6, *context[4:]]
    expected = language_logprobs(other, without, [], 7, [])[[*answer.tokens, SPECIAL.eop][0]]
    assert answer.lm_logprobs[0] == pytest.approx(float(expected), abs=3e-5)


class WorstFirst(Processor):
    """Takes the usual candidates in the wrong order, so that what is complete is not what would go on."""

    def select(self, totals, width, count):
        return [row.topk(count).indices.flip(0).tolist() for row in totals.flatten(1)]

    def __call__(self, state, scores):
        return scores


@pytest.mark.parametrize("max_len", [1, 2, 3])
def test_answers_that_are_cut_at_tokens_which_do_not_go_on(model, other, max_len):
    contexts = [[6, 7, 3, 8], [9, 3]]
    options = {"beam": 3, "nbest": 3, "max_len": max_len, "processors": [WorstFirst()]}
    for context, answers in zip(contexts, generator(model, other, **options).fill_ids(contexts), strict=True):
        assert len(answers[0].others) == 2
        for one, step, token, read in steps_of(context, answers):
            assert one.lm_logprobs[step] == pytest.approx(float(language_logprobs(other, *read)[token]), abs=3e-5)


@pytest.mark.parametrize("options", [{}, {"beam": 3}, {"sampling": True, "reencode": True}])
def test_streamed_answers_are_the_same(model, other, options):
    fused = generator(model, other, max_len=5, batch_size=2, **options)
    contexts = [context for context in CONTEXTS if set(context) & set(BLANKS)]
    expected = fused.fill_ids(contexts)
    streamed = {(one.request, one.number): one.answer for one in fused.stream_ids(contexts) if one.answer is not None}
    assert streamed == {(i, n): answer for i, row in enumerate(expected) for n, answer in enumerate(row)}


def test_what_must_come_has_the_score_of_both(model, other):
    forced = AllowedTokens(lambda context, blank, tokens: [9, 11][len(tokens) : len(tokens) + 1])
    ((answer,),) = generator(model, other, max_len=5, processors=[forced]).fill_ids([[6, 7, 3, 8]])
    assert answer.tokens == [9, 11]
    total = sum(answer.token_logprobs) + WEIGHT * sum(answer.lm_logprobs)
    assert answer.score == pytest.approx(total / 3, abs=3e-5)


def test_the_model_may_be_its_own_language_model_and_modes_are_kept(model):
    model.train()
    try:
        generator(model, model, max_len=3).fill_ids([[6, 3, 7]])
        assert model.training
    finally:
        model.eval()


def test_parts_keep_their_own_modes(other):
    around = nn.ModuleList([other])  # in training itself, as any new module, with a part that is not
    assert (around.training, other.training) == (True, False)
    with evaluation_mode(around):
        assert not around.training
    assert (around.training, other.training, other.layers[0].training) == (True, False, False)


def test_what_does_not_go_together_is_refused(model):
    with pytest.raises(UserError, match="a vocabulary of 21 tokens, the model one of 20"):
        generator(model, small_model(21))
    with pytest.raises(UserError, match="language model: answers of 30 tokens need 31 positions .* has 9"):
        generator(model, small_model(max_positions=8), max_len=30)
    for weight in (-0.1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="must be 0 or more, and finite"):
            generator(model, model, weight)
    with pytest.raises(UserError, match=r"no \[gMASK\] or \[MASK\]"):
        LanguageModel(model, SimpleNamespace(sop=1, eop=2, smask=4), 0.5)


@pytest.mark.parametrize(("arch", "positions"), [("gpt2_tiny", 12), ("cpmant_tiny", 64)])
def test_a_causal_language_model_reads_as_its_own_positions_and_rows_say(arch, positions):
    models = spread("gpt2_tiny", 1), spread("cpmant_tiny", 2)  # with rows in front, and without
    other = spread(arch, 3, max_positions=positions)
    for model in models:
        framing = Continuation([1], begins=[5]).read_by(model.config)
        reader = PromptReader(other, framing, Fusion(0.5))
        requests = [Request([5, 6, 7, 8] * count, GenerationConfig(max_len=5)) for count in (1, 4)]
        engine = engine_for(model, framing, requests, 2, reader)
        for request, (answer,) in zip(requests, engine.answers(requests), strict=True):
            # Of five tokens the last one is not read; what every text begins with stays.
            read = [5, *request.prompt[1:][-(positions - 5) :]]
            written = [*answer.tokens, *[1] * answer.ended]
            seen = {"context_length": torch.tensor([len(read)])} if "context_length" in other.INPUTS else {}
            with torch.no_grad():
                found = other(torch.tensor([[*read, *written[:-1]]]), **seen)[0, len(read) - 1 :].log_softmax(-1)
            assert list(answer.lm_logprobs) == pytest.approx(
                found.gather(1, torch.tensor(written)[:, None])[:, 0].tolist(), abs=1e-4
            )
