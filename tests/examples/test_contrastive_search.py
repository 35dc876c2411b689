"""Contrastive search against its paper's equation, with the whole sequence read for every candidate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Request
from ftk.generation.engine.source_to_target import SourceToTarget
from ftk.modules.kv_cache import Places
from ftk.plugins import import_user_dir
from ftk.registry import SEARCHES
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation import slow
from tests.generation.slow import SPECIAL, small_model
from tests.generation.test_ensemble import spread
from tests.generation.test_in_flight import assert_alike
from tests.small_run import forget_plugin

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "contrastive_search"


@pytest.fixture(scope="module", autouse=True)
def plugin():
    """It is forgotten afterwards, so that other tests see ftk's own strategies alone, or import it again."""
    import_user_dir(str(EXAMPLE))
    yield
    forget_plugin(EXAMPLE.name, SEARCHES, "contrastive")


def read(model, context, filled, blank, answer):
    """Hidden states [T, H] and the distribution [V] of the next token, of all that was read so far."""
    with torch.no_grad():
        hidden = model.hidden_states(**slow.inputs_of(model, context, filled, blank, answer))[0]
        return hidden, model.head(hidden[-1]).softmax(-1)


def slow_contrastive(model, context, candidates, alpha, max_len, min_len=0):
    """[tokens with their end] of each blank: Su et al. 2022, equation 5."""
    filled, found = [], []
    for blank in (index for index, token in enumerate(context) if token in slow.BLANKS):
        answer, ended = [], False
        while not ended and len(answer) < max_len:
            states, probabilities = read(model, context, filled, blank, answer)
            if len(answer) < min_len:
                probabilities[SPECIAL.eop] = 0
                probabilities /= probabilities.sum()
            merits = {}
            for token in probabilities.topk(candidates).indices.tolist():
                own = read(model, context, filled, blank, [*answer, token])[0][-1]
                alike = max(float(torch.cosine_similarity(own, state, dim=0)) for state in states)
                merits[token] = (1 - alpha) * float(probabilities[token]) - alpha * alike
            best = max(merits, key=merits.__getitem__)
            answer, ended = [*answer, best], best == SPECIAL.eop
        found.append(answer)
        filled.append((blank, answer[:-1] if ended else answer))
    return found


CONTEXTS = [[7, 8, 3, 9], [11, 3, 12, 4, 13, 14], [3], [6, 7, 8, 9, 10, 11, 12, 3, 16, 17], [3, 4, 5]]


@pytest.mark.parametrize(("candidates", "alpha"), [(2, 0.6), (4, 0.3), (5, 0.9), (1, 0.6), (3, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_answers_equal_the_slow_version(seed, candidates, alpha):
    model = small_model(seed=seed)
    generator = BlankGenerator(model, SPECIAL, search=f"contrastive candidates={candidates} alpha={alpha}", max_len=5)
    for context, answers in zip(CONTEXTS, generator.fill_ids(CONTEXTS), strict=True):
        whole = [answer.tokens + [SPECIAL.eop] * answer.ended for answer in answers]
        assert whole == slow_contrastive(model, context, candidates, alpha, 5)


def test_it_is_neither_greedy_nor_without_the_context():
    model = small_model(seed=1)
    greedy = BlankGenerator(model, SPECIAL, max_len=5).fill_ids(CONTEXTS)
    found = BlankGenerator(model, SPECIAL, search="contrastive", max_len=5).fill_ids(CONTEXTS)
    assert [[a.tokens for a in row] for row in found] != [[a.tokens for a in row] for row in greedy]
    # With alpha 0, or one candidate, it is greedy.
    for option in ("alpha=0", "candidates=1"):
        same = BlankGenerator(model, SPECIAL, search=f"contrastive {option}", max_len=5).fill_ids(CONTEXTS)
        assert [[a.tokens for a in row] for row in same] == [[a.tokens for a in row] for row in greedy]


def test_a_minimal_length_holds_and_log_probabilities_are_the_models_own():
    model = small_model(seed=2)
    generator = BlankGenerator(model, SPECIAL, search="contrastive", max_len=4, min_len=3)
    for context, answers in zip(CONTEXTS, generator.fill_ids(CONTEXTS), strict=True):
        whole = [answer.tokens + [SPECIAL.eop] * answer.ended for answer in answers]
        assert whole == slow_contrastive(model, context, 4, 0.6, 4, min_len=3)
        blank = next(index for index, token in enumerate(context) if token in slow.BLANKS)
        for index, token in enumerate(whole[0]):
            expected = slow.next_logprobs(model, context, [], blank, whole[0][:index])[token]
            assert answers[0].token_logprobs[index] == pytest.approx(float(expected), abs=1e-4)


def test_more_candidates_than_tokens_are_all_of_them():
    model, context = small_model(vocab_size=8), [7, 3, 6]
    every = slow_contrastive(model, context, 8, 0.6, 4)
    generator = BlankGenerator(model, SPECIAL, search="contrastive candidates=30", max_len=4)
    assert [a.tokens + [SPECIAL.eop] * a.ended for a in generator.fill_ids([context])[0]] == every


def test_the_token_read_ahead_needs_a_position_too():
    model = small_model()  # tables of 65 rows
    assert BlankGenerator(model, SPECIAL, search="contrastive", max_len=63, min_len=63).fill_ids([[7, 3]])[0]
    with pytest.raises(UserError, match=r"`max_len` can be at most 63"):
        BlankGenerator(model, SPECIAL, search="contrastive", max_len=64).fill_ids([[7, 3]])


@pytest.mark.parametrize(
    ("arch", "framing", "prompt"),
    [
        ("gpt2_tiny", Continuation([2], 12), [7, 8, 9]),
        ("bart_tiny", SourceToTarget([2], [1, 3, 4], 12), [7, 2]),
    ],
)
def test_of_other_models_too(arch, framing, prompt):
    model = spread(arch, 0, max_positions=12)
    options = {"search": "contrastive", "min_len": 9}  # behind three tokens that are read
    request = Request(prompt, GenerationConfig(max_len=9, **options))
    framing.check(request)
    ((answer,),) = engine_for(model, framing, [request], 1).answers([request])
    assert len(answer.tokens) == 9
    with pytest.raises(UserError, match="12 positions"):
        framing.check(Request(prompt, GenerationConfig(max_len=10, **options)))


def test_in_flight_alone_and_streamed_the_answers_are_the_same():
    model = small_model(seed=1)
    generator = BlankGenerator(model, SPECIAL, search="contrastive candidates=3", max_len=5, batch_size=2)
    found = generator.fill_ids(CONTEXTS)
    for context, row in zip(CONTEXTS, found, strict=True):
        assert_alike(generator.fill_ids([context])[0], row)
    one = BlankGenerator(model, SPECIAL, search="contrastive", max_len=5, min_len=5)
    parts = [len(event.tokens) for event in one.stream_ids([[7, 3, 8]]) if event.kind != "done"]
    assert parts == [1, 1, 1, 1, 1, 0]


def hidden_states(num_rows, capacity):
    from contrastive_search.hidden_states import HiddenStates

    return HiddenStates(num_rows, capacity)


def settle(states, row, hidden, start):
    count = hidden.size(0)
    numbers = torch.arange(count)
    states.settle(hidden[None], Places(torch.full((count,), row), start + numbers, torch.zeros_like(numbers), numbers))


def slow_nearest(last, settled, mask):
    return torch.stack([(one @ there[seen].T).amax(-1) for one, there, seen in zip(last, settled, mask, strict=True)])


def test_nearest_is_what_the_loops_find_and_follows_every_change():
    generator = torch.Generator().manual_seed(0)
    states = hidden_states(4, 10)
    settle(states, 2, torch.randn(3, 6, generator=generator), 0)
    settle(states, 0, torch.randn(5, 6, generator=generator), 0)
    rows = torch.tensor([2, 0])
    own = states.of(rows)
    for step in range(4):
        hidden = torch.randn(3, 2, 6, generator=generator)
        states.look(hidden)
        assert torch.equal(own.last, F.normalize(hidden, dim=-1)[rows])
        torch.testing.assert_close(own.nearest, slow_nearest(own.last, own.settled, own.mask))
        if step == 0:  # a further blank begins behind what is there: it counts at once
            before = own.nearest.clone()
            settle(states, 0, hidden[0], 5)
            assert torch.allclose(own.nearest[1], torch.ones(2))
            assert torch.equal(own.nearest[0], before[0])
        elif step == 1:  # another prompt takes the row
            states.clear([0])
            settle(states, 0, torch.randn(1, 6, generator=generator), 0)
            torch.testing.assert_close(own.nearest, slow_nearest(own.last, own.settled, own.mask))
    torch.testing.assert_close(own.keep(torch.tensor([1])).nearest, own.nearest[1:])
