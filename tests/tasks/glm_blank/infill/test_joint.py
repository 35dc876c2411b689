"""The n best over all blanks equal every combination of answers there is, and slow beams carried on."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.generation.processors.stop_strings import StopStrings
from ftk.tasks.glm_blank import BlankGenerator
from ftk.tasks.glm_blank.infill import joint
from ftk.tasks.glm_blank.infill.blanks import blank_numbers
from ftk.tasks.glm_blank.infill.config import FillConfig
from ftk.tasks.glm_blank.infill.language_model import LanguageModel
from tests.generation.slow import BLANKS, SPECIAL, next_logprobs, small_model
from tests.generation.tables import TABLE_SPECIAL, SlowBeam
from tests.generation.test_fusion import language_logprobs
from tests.generation.test_in_flight import assert_alike
from tests.tasks.glm_blank.infill.test_orders import CONTEXTS

TINY = SimpleNamespace(sop=1, eop=2, mask=3)


def fill_texts(generator, contexts, seeds=None, progress=None):
    """The ways to fill each context as a whole, best first."""
    penalty, of_texts = generator.config.length_penalty, generator.config.nbest_over == "text"
    found = generator.fill_ids(contexts, seeds, progress)
    return [joint.fillings_of(own, penalty) if of_texts and own else [joint.filling(own, penalty)] for own in found]


class Combination:
    """Answers to the blanks so far, with what is read of the text and them; slow and by itself."""

    def __init__(self, context, reencode=False, blanks=BLANKS):
        self.context, self.reencode = list(context), reencode
        self.places = dict(enumerate(index for index, token in enumerate(context) if token in blanks))
        self.filled, self.answers, self.total, self.length = [], {}, 0.0, 0

    def next_scores(self, models, number, tokens):
        given = (self.context, self.filled, self.places[number], tokens)
        scores = next_logprobs(models[0], *given)
        for language_model, weight, mask in models[1:]:
            scores = scores + weight * language_logprobs(language_model, *given, mask=mask)
        return scores.tolist()

    def answered(self, number, written, total):
        """With an answer, its end token included if it came, and the sum of its scores."""
        other = Combination([], self.reencode)
        words = [token for token in written if token != 2]
        other.context, other.places, other.filled = list(self.context), dict(self.places), list(self.filled)
        place = other.places.pop(number)
        if self.reencode:
            other.context[place : place + 1] = words
            other.places = {n: at + (len(words) - 1) * (at > place) for n, at in other.places.items()}
        else:
            other.filled.append((place, words))
        other.answers = {**self.answers, number: written}
        other.total, other.length = self.total + total, self.length + len(written)
        return other

    def score(self, penalty):
        return self.total / self.length**penalty


def every_answer(vocab_size, max_len):
    for length in range(1, max_len + 1):
        for tokens in itertools.product(range(vocab_size), repeat=length):
            if 2 not in tokens[:-1] and (tokens[-1] == 2 or length == max_len):
                yield list(tokens)


def every_combination(models, context, vocab_size, max_len, order, reencode=False):
    found = [Combination(context, reencode, (3,))]
    for number in order:
        continued = []
        for one in found:
            rows: dict[tuple[int, ...], list[float]] = {}
            for tokens in every_answer(vocab_size, max_len):
                total = 0.0
                for step, token in enumerate(tokens):
                    before = tuple(tokens[:step])
                    if before not in rows:
                        rows[before] = one.next_scores(models, number, list(before))
                    total += rows[before][token]
                continued.append(one.answered(number, tokens, total))
        found = continued
    return found


def carried_beams(models, context, order, width, max_len, penalty, reencode=False):
    """Beams as lists; of all continuations together the best go on."""
    going = [Combination(context, reencode)]
    for number in order:
        continued = []
        for one in going:
            beam = SlowBeam(width, max_len, penalty, "true")
            for _ in range(max_len):
                if not beam.closed:
                    beam.step(lambda tokens, one=one, number=number: one.next_scores(models, number, tokens))
            continued += [one.answered(number, w, score * len(w) ** penalty) for w, score in beam.done]
        going = sorted(continued, key=lambda one: -one.score(penalty))[:width]
    return going


def assert_fillings(found, expected, penalty):
    assert len(found) == len(expected)
    for filling, one in zip(found, expected, strict=True):
        written = [answer.tokens + [2] * answer.ended for answer in filling.answers]
        assert written == [one.answers[number] for number in sorted(one.answers)]
        assert filling.score == pytest.approx(one.score(penalty), abs=3e-5)
        assert all(answer.others == () for answer in filling.answers)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize(
    ("context", "max_len", "width"), [([0, 3, 4, 3, 5], 2, 31), ([4, 3, 0, 3, 5, 3], 1, 36), ([0, 4, 3], 2, 31)]
)
def test_wide_beams_find_the_best_of_all_combinations(context, max_len, width, penalty):
    for seed, reencode, order in ((0, False, "left"), (1, True, "left"), (2, False, "2,1"), (3, True, "2")):
        model = small_model(6, seed)
        numbers = blank_numbers(order, context.count(3))
        everything = every_combination([model], context, 6, max_len, numbers, reencode)
        everything.sort(key=lambda one: -one.score(penalty))
        options = {"beam": width, "nbest": 12, "max_len": max_len, "length_penalty": penalty, "blank_order": order}
        generator = BlankGenerator(
            model, TINY, nbest_over="text", early_stopping="never", reencode=reencode, batch_size=40, **options
        )
        (found,) = fill_texts(generator, [context])
        assert_fillings(found, everything[:12], penalty)


AFTER = {(): (0.6, 0.4), (0,): (0.5, 0.5), (1,): (0.9, 0.1)}  # words read before: chances of 0 and 1


class LooksBack(nn.Module):
    """0 or 1 in each blank, one word an answer; how likely each is follows from the words that were read before."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))
        self.layers = nn.ModuleList([self.Layer()])

    class Layer(nn.Module):
        def forward(self, hidden, attend):
            own = hidden[..., :5]  # [B, T, 5]
            nothing = torch.zeros_like(own)[:, None]
            return torch.cat((own, attend(nothing, nothing, own[:, None])[:, 0]), dim=-1)  # the mean of what is seen

    def embed(self, tokens, position_ids):
        return nn.functional.one_hot(tokens, 10).float()

    def finish(self, hidden):
        return hidden

    def head(self, hidden):
        rows = []
        for own, seen in zip(hidden[..., :5].argmax(-1).flatten(), hidden[..., 5:].flatten(0, -2), strict=True):
            words = tuple(word for word in (0, 1) if seen[word] > 1e-3)
            first, second = AFTER.get(words, (0.5, 0.5))
            rows.append((first, second, 1e-9, 0, 0) if own == 3 else (0, 0, 1, 0, 0))
        return torch.tensor(rows).log().view(*hidden.shape[:-1], 5)


def test_the_best_combination_is_not_made_of_the_best_answers():
    options = {"beam": 2, "max_len": 3, "length_penalty": 0.0}
    (blank_by_blank,) = fill_texts(BlankGenerator(LooksBack(), TABLE_SPECIAL, **options), [[4, 4]])
    jointly = BlankGenerator(LooksBack(), TABLE_SPECIAL, nbest_over="text", nbest=2, **options)
    (best, second) = fill_texts(jointly, [[4, 4]])[0]
    assert [answer.tokens for answer in blank_by_blank[0].answers] == [[0], [0]]
    assert blank_by_blank[0].score == pytest.approx(math.log(0.6 * 0.5))
    assert [answer.tokens for answer in best.answers] == [[1], [0]]
    assert best.score == pytest.approx(math.log(0.4 * 0.9))
    assert [answer.tokens for answer in second.answers] in ([[0], [0]], [[0], [1]])
    assert second.score == pytest.approx(math.log(0.6 * 0.5))


@pytest.mark.parametrize("options", [{}, {"reencode": True}, {"blank_order": "3,1"}])
@pytest.mark.parametrize("width", [2, 3])
def test_narrow_beams_equal_the_slow_lists(width, options):
    model = small_model(seed=2)
    generator = BlankGenerator(
        model, SPECIAL, beam=width, nbest=width, nbest_over="text", max_len=4, length_penalty=0.7, **options
    )
    counts = []
    found = fill_texts(generator, CONTEXTS, progress=counts.append)
    assert sum(counts) == sum(any(token in BLANKS for token in context) for context in CONTEXTS)
    for context, fillings in zip(CONTEXTS, found, strict=True):
        order = blank_numbers(options.get("blank_order", "left"), sum(token in BLANKS for token in context))
        if order:
            expected = carried_beams([model], context, order, width, 4, 0.7, options.get("reencode", False))
            assert_fillings(fillings, expected, 0.7)
        else:
            assert [filling.answers for filling in fillings] == [[]]


def test_with_a_language_model():
    model, other = small_model(seed=2), small_model(seed=9)
    options = {"beam": 3, "nbest": 3, "nbest_over": "text", "max_len": 3, "length_penalty": 0.5}
    language_model = LanguageModel(other, SPECIAL, 0.6)
    found = fill_texts(BlankGenerator(model, SPECIAL, language_model=language_model, **options), CONTEXTS[:1])
    models = [model, (other, 0.6, SPECIAL.gmask)]
    assert_fillings(found[0], carried_beams(models, CONTEXTS[0], [0, 1, 2], 3, 3, 0.5)[:3], 0.5)
    for answer in found[0][0].answers:
        assert len(answer.lm_logprobs) == len(answer.token_logprobs)


def test_one_blank_has_the_n_best_that_it_has_alone():
    contexts = [[7, 3, 8], [9, 10, 4], [11, 5]]
    for options in ({"beam": 4}, {"search": "diverse_beam", "beam": 4}, {"search": "beam_sampling", "beam": 4}):
        options = options | {"nbest": 3, "max_len": 5, "length_penalty": 0.6}
        jointly = fill_texts(BlankGenerator(small_model(), SPECIAL, nbest_over="text", **options), contexts)
        alone = BlankGenerator(small_model(), SPECIAL, **options).fill_ids(contexts)
        for fillings, (answer,) in zip(jointly, alone, strict=True):
            assert_alike([one.answers[0] for one in fillings], [replace(answer, others=()), *answer.others])
            assert [one.score for one in fillings] == pytest.approx([answer.score, *(o.score for o in answer.others)])


@pytest.fixture
def sampled():
    def fill(contexts, seeds, **options):
        options = {"sampling": True, "nbest_over": "text", "max_len": 4, **options}
        return fill_texts(BlankGenerator(small_model(), SPECIAL, **options), contexts, seeds)

    return fill


@pytest.mark.parametrize("options", [{}, {"reencode": True}, {"blank_order": "confident"}])
def test_samples_of_a_text_are_drawn_blank_after_blank(sampled, options):
    contexts, seeds = CONTEXTS[:3], [3, 4, 5]
    one, four = (sampled(contexts, seeds, nbest=count, **options) for count in (1, 4))
    plain = BlankGenerator(small_model(), SPECIAL, sampling=True, max_len=4, **options).fill_ids(contexts, seeds)
    for index, (context, fillings) in enumerate(zip(contexts, four, strict=True)):
        assert_alike(one[index][0].answers, plain[index])
        assert [a.tokens for a in plain[index]] in [[a.tokens for a in filling.answers] for filling in fillings]
        assert len({str([a.tokens for a in filling.answers]) for filling in fillings}) > 1
        scores = [filling.score for filling in fillings]
        assert scores == sorted(scores, reverse=True)
        (alone,) = sampled([context], [seeds[index]], nbest=4, **options)
        for filling, other in zip(fillings, alone, strict=True):
            assert_alike(filling.answers, other.answers)


def test_what_a_stop_string_cuts_off_counts_as_before():
    stop = StopStrings(["9"], lambda tokens: " ".join(map(str, tokens)))
    options = {"beam": 4, "nbest": 4, "nbest_over": "text", "max_len": 5, "length_penalty": 0.0}
    cut = plain = 0
    for seed in range(4):
        for context in ([6, 3, 7, 3], [8, 3, 10, 11]):
            generator = BlankGenerator(small_model(seed=seed), SPECIAL, processors=[stop], **options)
            for filling in fill_texts(generator, [context])[0]:
                assert filling.score == pytest.approx(sum(answer.score for answer in filling.answers), abs=1e-6)
                cut += any(answer.num_scored for answer in filling.answers)
                plain += not any(answer.num_scored for answer in filling.answers)
    assert cut > 0
    assert plain > 0


def test_fill_ids_and_streams_have_the_best_together():
    options = {"beam": 3, "nbest": 2, "nbest_over": "text", "max_len": 4}
    generator = BlankGenerator(small_model(seed=2), SPECIAL, **options)
    expected = [fillings[0].answers for fillings in fill_texts(generator, CONTEXTS)]
    found = generator.fill_ids(CONTEXTS)
    assert [[replace(answer, others=()) for answer in row] for row in found] == expected
    asked = [row for row in found if row]
    streamed = generator.stream_ids([context for context, row in zip(CONTEXTS, found, strict=True) if row])
    assert {(one.request, one.number): one.answer for one in streamed if one.answer is not None} == {
        (i, n): answer for i, row in enumerate(asked) for n, answer in enumerate(row)
    }


def test_without_it_a_text_has_one_filling():
    generator = BlankGenerator(small_model(seed=2), SPECIAL, beam=3, nbest=2, max_len=4, length_penalty=0.0)
    for answers, fillings in zip(generator.fill_ids(CONTEXTS), fill_texts(generator, CONTEXTS), strict=True):
        assert [filling.answers for filling in fillings] == [answers]
        assert fillings[0].score == pytest.approx(sum(answer.score for answer in answers), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbest_over": "word"}, "nbest_over is 'word'; it must be one of blank, text"),
        ({"nbest_over": "text"}, "nbest_over is text, but greedy search does not use it; it goes with `search` beam"),
        ({"nbest_over": "text", "beam": 2, "blank_order": "confident"}, "name the blank_order"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    assert any(message in error for error in mistakes(FillConfig(**options)))


def test_a_strategy_of_ones_own_that_has_one_answer_is_refused():
    generator = BlankGenerator(small_model(), SPECIAL, beam=2)
    generator.config.nbest_over, generator.config.search = "text", "greedy"
    with pytest.raises(UserError, match="has one answer to a text"):
        fill_texts(generator, [[6, 3]])
