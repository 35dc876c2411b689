"""What holds for every strategy: batches, caches, seeds, prompts that leave, and options that do not fit."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.generation import GenerationConfig
from ftk.generation.search import Search, SearchTask, strategy
from ftk.generation.search.greedy import GreedySearch
from ftk.registry import SEARCHES
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation import slow
from tests.generation.slow import SPECIAL, small_model
from tests.generation.tables import whole
from tests.tasks.glm_blank.infill.test_generator import random_contexts

STRATEGIES = {
    "greedy": {},
    "beam": {"beam": 3, "nbest": 2, "early_stopping": "false"},
    "diverse_beam": {"beam": 4, "nbest": 4, "diversity_strength": 1.0},
    "sampling": {"temperature": 1.5, "top_p": 0.95, "min_p": 0.01, "nbest": 3},
    "beam_sampling": {"beam": 3, "nbest": 3, "temperature": 1.5, "typical_p": 0.95},
}


def test_every_built_in_strategy_is_tested_here():
    assert set(STRATEGIES) == {name for name in SEARCHES if SEARCHES.get(name).target.__module__.startswith("ftk.")}


@pytest.mark.parametrize("name", STRATEGIES)
def test_log_probabilities_are_those_of_the_uncached_model(name):
    model = small_model(seed=3)
    generator = BlankGenerator(model, SPECIAL, search=name, max_len=5, **STRATEGIES[name])
    for context in random_contexts(8, 6):
        for one, step, token, read in slow.steps_of(context, generator.fill_ids([context])[0]):
            assert one.token_logprobs[step] == pytest.approx(float(slow.next_logprobs(model, *read)[token]), abs=1e-4)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("batch_size", [3, 100])
def test_alternatives_are_the_likeliest_tokens_of_the_uncached_model(name, batch_size):
    model = small_model(seed=3)
    options = {"search": name, "max_len": 5, "batch_size": batch_size, **STRATEGIES[name]}
    generator = BlankGenerator(model, SPECIAL, alternatives=3, **options)
    contexts = random_contexts(8, 8)
    rows = generator.fill_ids(contexts)
    for context, answers, plain in zip(
        contexts, rows, BlankGenerator(model, SPECIAL, **options).fill_ids(contexts), strict=True
    ):
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
        assert all(without.alternatives == () for without in plain)
        for one, step, token, read in slow.steps_of(context, answers):
            assert len(one.alternatives) == len(one.token_logprobs)
            place, expected = one.alternatives[step], slow.next_logprobs(model, *read).topk(3)
            np.testing.assert_allclose([value for _, value in place], expected.values, rtol=0, atol=1e-4)
            own = one.token_logprobs[step]  # of a sum that may be rounded otherwise
            assert dict(place).get(token, own) == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_seed_changes_the_strategies_that_draw_and_no_others(name):
    generator = BlankGenerator(small_model(), SPECIAL, search=name, max_len=6, **STRATEGIES[name])
    rows = generator.fill_ids([[7, 3, 8, 9]] * 12, seeds=range(12))
    different = len({tuple(answer.tokens) for (answer,) in rows})
    assert (different > 1) == (name in ("sampling", "beam_sampling"))
    again = generator.fill_ids([[7, 3, 8, 9]] * 12, seeds=range(12))
    assert rows == again


@pytest.mark.parametrize("name", STRATEGIES)
def test_prompts_that_leave_change_nothing_for_those_that_stay(name):
    """`keep` in mid search, as in-flight batching uses it."""
    config = GenerationConfig(search=name, max_len=5, **STRATEGIES[name])
    chosen, device = strategy(config), torch.device("cpu")
    draws = chosen.draws(1)
    torch.manual_seed(0)
    uniforms = torch.rand(4, 5, draws, dtype=torch.float64) if draws else None
    logits = [torch.randn(4, chosen.width if step else 1, 9) * 2 for step in range(5)]

    def run(leaves):
        rows = torch.arange(4)
        search = chosen.build(SearchTask(4, (2,), device, uniforms, [[row] for row in range(4)], [0, 0, 0, 0]))
        for step, one in enumerate(logits):
            if step in leaves:
                search.keep(torch.tensor(leaves[step]))
                rows = rows[leaves[step]]
            search.advance(one[rows])
        return dict(zip(rows.tolist(), search.answers(), strict=True))

    whole_run, shrinking = run({}), run({2: [3, 0, 2], 4: [2, 0]})
    assert shrinking == {row: whole_run[row] for row in (2, 3)}


def test_a_strategy_registered_with_options_gets_them():
    @dataclass(kw_only=True)
    class Options:
        rank: int = 2

        def validate(self):
            if self.rank < 1:
                yield f"rank is {self.rank}; it must be at least 1"

    try:

        @SEARCHES.register("test_nth_best", config=Options)
        class NthBest(GreedySearch):
            def choose(self, scores):
                return scores.topk(self.options.rank, dim=-1).indices[..., -1]

        model, context = small_model(), [7, 3]
        expected = slow.next_logprobs(model, context, [], 1, []).argsort(descending=True)[:3].tolist()
        for text, rank in (("test_nth_best rank=3", 3), ("test_nth_best", 2)):
            ((answer,),) = BlankGenerator(model, SPECIAL, search=text, max_len=1).fill_ids([context])
            assert whole(answer)[0] == expected[rank - 1]
        for text, message in (("test_nth_best rank=0", "rank is 0"), ("test_nth_best ranks=1", "ranks")):
            with pytest.raises(UserError, match=message):
                BlankGenerator(model, SPECIAL, search=text)
    finally:
        del SEARCHES._entries["test_nth_best"]


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda scores: None, "is None; it must be int64 [1, 2], the next token of each hypothesis"),
        (lambda scores: scores.argmax(-1).float(), "is float32 [1, 2]; it must be int64 [1, 2]"),
        (lambda scores: scores.argmax(-1)[0], "is int64 [2]; it must be int64 [1, 2]"),
        (lambda scores: scores.argmax(-1) + 1000, "; tokens are from 0 to "),
        (lambda scores: scores.argmax(-1) * 0 + SPECIAL.eop, "whose score is -inf; it must choose one that is "),
    ],
)
def test_what_a_plugins_strategy_chooses_is_checked(choose, message):
    try:

        @SEARCHES.register("test_broken")
        class Broken(GreedySearch):
            def choose(self, scores):
                return choose(scores)

        generator = BlankGenerator(small_model(), SPECIAL, search="test_broken", min_len=2, max_len=3, nbest=2)
        with pytest.raises(UserError, match=rf"Broken \(.*test_strategies.*what choose returns .*{re.escape(message)}"):
            generator.fill_ids([[7, 3]])
    finally:
        del SEARCHES._entries["test_broken"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "greedy"),
        ({"beam": 4}, "beam"),
        ({"sampling": True}, "sampling"),
        ({"search": "sampling", "sampling": True}, "sampling"),
        ({"search": "beam", "beam": 2}, "beam"),
    ],
)
def test_beam_and_sampling_are_short_for_their_strategies(options, name):
    config = GenerationConfig(**options)
    assert mistakes(config) == []
    assert issubclass(strategy(config).target, Search)
    assert strategy(config).target is SEARCHES.get(name).target


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0}, "beam is 0"),
        ({"max_len": 0}, "max_len is 0"),
        ({"min_len": 30}, "min_len is 30"),
        ({"beams": 2}, "did you mean 'beam'"),
        ({"sampling": True, "temperature": 0.0}, "temperature is 0.0"),
        ({"sampling": True, "temperature": -1.0}, "temperature is -1.0"),
        ({"sampling": True, "top_p": 0.0}, "top_p is 0.0"),
        ({"sampling": True, "top_k": -1}, "top_k is -1"),
        ({"search": "bem"}, "search is 'bem'; there are: beam, beam_sampling"),
        ({"search": ""}, "search is ''"),
        ({"search": "greedy alpha=1"}, "search 'greedy' has no options, but alpha is given"),
        ({"search": "beam"}, "beam is 1; give it more hypotheses, e.g. `beam` 4"),
        ({"search": "greedy", "beam": 4}, "beam is 4, but greedy search does not use it"),
        ({"search": "beam", "beam": 4, "sampling": True}, "search is beam and sampling is on; choose one"),
        ({"beam": 4, "sampling": True}, "choose one of them, or `search` beam_sampling for both"),
        ({"beam": 3, "nbest": 4}, "nbest is 4, but beam is 3"),
        ({"nbest": 2}, "nbest is 2, but greedy search does not use it"),
        ({"nbest": 0}, "nbest is 0; it must be at least 1"),
        ({"beam": 4, "early_stopping": "maybe"}, "early_stopping is 'maybe'; it must be one of true, false, never"),
        ({"early_stopping": "never"}, "early_stopping is never, but greedy search does not use it"),
        ({"search": "diverse_beam", "beam": 4, "diverse_groups": 3}, "diverse_groups is 3, which does not divide"),
        ({"search": "diverse_beam", "beam": 4, "diverse_groups": 0}, "diverse_groups is 0; it must be at least 1"),
        ({"search": "diverse_beam", "beam": 4, "diversity_strength": -1.0}, "diversity_strength is -1.0"),
        ({"beam": 4, "diversity_strength": 1.0}, "goes with `search` diverse_beam"),
        ({"sampling": True, "min_p": 1.5}, "min_p is 1.5; it must be from 0 to 1"),
        ({"sampling": True, "min_p": -0.1}, "min_p is -0.1"),
        ({"sampling": True, "typical_p": 0.0}, "typical_p is 0.0; it must be above 0"),
        ({"sampling": True, "top_p": float("nan")}, "top_p is nan"),
        ({"sampling": True, "temperature": float("inf")}, "temperature is inf"),
        ({"beam": 2, "top_p": 0.9}, "sampling is off; turn it on by `sampling`, or `search` beam_sampling"),
        ({"typical_p": 0.9}, "typical_p is 0.9, but greedy search does not use it; sampling is off"),
    ],
)
def test_options_that_do_not_fit_are_named(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        BlankGenerator(small_model(), SPECIAL, **options)


def test_early_stopping_is_understood_as_a_truth_value_too():
    assert GenerationConfig(beam=2, early_stopping=True).early_stopping == "true"
    assert GenerationConfig(beam=2, early_stopping=False).early_stopping == "false"
