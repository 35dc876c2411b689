"""Lexical constraints against every answer there is."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.generation.processors.constraints import LexicalConstraints
from ftk.generation.processors.phrases import PhraseTrie
from ftk.generation.processors.progress import OrderedProgress, UnorderedProgress, fewest_tokens
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation.processors.helpers import allowed, run, state_of
from tests.generation.tables import TABLE_SPECIAL, TableModel, every_answer, random_table, whole

LETTERS = (0, 1, 5)
PHRASE = st.lists(st.sampled_from(LETTERS), min_size=1, max_size=3).map(tuple)
SPELLINGS = st.lists(PHRASE, min_size=1, max_size=2)


def holds(row, part):
    """Whether `part` stands in `row`, its tokens side by side."""
    return any(tuple(row[i : i + len(part)]) == tuple(part) for i in range(len(row) - len(part) + 1))


def has_all(tokens, phrases):
    return all(any(holds(tokens, row) for row in spellings) for spellings in phrases)


def has_all_in_order(tokens, phrases):
    """One behind the other, wherever the first may be."""
    if not phrases:
        return True
    return any(
        tuple(tokens[at : at + len(row)]) == row and has_all_in_order(tokens[at + len(row) :], phrases[1:])
        for row in phrases[0]
        for at in range(len(tokens))
    )


def shortest_rest(tokens, phrases, complete, limit):
    """How many tokens are lacking, by trying all there are."""
    for length in range(limit + 1):
        if any(complete([*tokens, *rest], phrases) for rest in itertools.product(LETTERS, repeat=length)):
            return length
    raise AssertionError("never complete")


@given(st.lists(PHRASE, min_size=1, max_size=4), st.lists(st.sampled_from((*LETTERS, 6)), max_size=12))
def test_the_trie_knows_every_row_that_ends_here_and_the_longest_beginning(rows, stream):
    trie, state = PhraseTrie(rows), 0
    for length, token in enumerate(stream, start=1):
        state = trie.advance(state, token)
        so_far = tuple(stream[:length])
        assert {trie.rows[index] for index in trie.ending[state]} == {r for r in rows if so_far[-len(r) :] == r}
        begun = {i: max(n for n in range(len(r)) if n == 0 or so_far[-n:] == r[:n]) for i, r in enumerate(rows)}
        assert trie.begun(state) == {number: count for number, count in begun.items() if count}
    assert trie.within(tuple(stream)) == {number for number, row in enumerate(rows) if holds(stream, row)}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SPELLINGS, min_size=1, max_size=2),
    st.lists(st.sampled_from((*LETTERS, 6)), max_size=5),
    st.sampled_from([(UnorderedProgress, has_all), (OrderedProgress, has_all_in_order)]),
)
def test_what_is_needed_is_the_shortest_rest_there_is(phrases, tokens, kind):
    make, complete = kind
    progress = make(phrases)
    assert progress.need(progress.after(tokens)) == shortest_rest(tokens, phrases, complete, 6)


@given(st.lists(SPELLINGS, min_size=1, max_size=3))
def test_no_answer_does_with_fewer_tokens_than_one_look_at_the_phrases_says(phrases):
    progress = UnorderedProgress(phrases)
    assert fewest_tokens(phrases) <= progress.need(progress.start)


def test_an_automaton_of_many_tokens_is_no_larger_than_its_rows():
    """Twice the tokens are twice the entries: nothing is kept for pairs of them."""
    sizes = []
    for count in (2_000, 4_000):
        trie = PhraseTrie([tuple(range(count)), *((number, number) for number in range(count))])
        tables = (trie._children, trie.through, trie.ending)
        sizes.append(sum(len(entry) for table in tables for entry in table))
    assert sizes[1] <= 2 * sizes[0]


@given(st.lists(SPELLINGS, min_size=1, max_size=12), st.lists(st.sampled_from(LETTERS), max_size=8), st.booleans())
def test_some_token_always_brings_it_on_and_no_other_sets_it_back_beyond_forgetting(phrases, tokens, ordered):
    progress = (OrderedProgress if ordered else UnorderedProgress)(phrases)
    state = progress.after(tokens)
    need = progress.need(state)
    nexts = [progress.need(progress.advance(state, token)) for token in progress.tokens]
    if need:
        assert min(nexts) <= need - 1
    assert max(nexts) <= progress.need(progress.forget(state))
    complete = has_all_in_order if ordered else has_all
    assert (need == 0) == complete(tokens, phrases)


def constrained(table, phrases, ordered=False, max_lens=(), **options):
    progress = (OrderedProgress if ordered else UnorderedProgress)(phrases)
    processor = LexicalConstraints({-1: progress}, max_lens)
    generator = BlankGenerator(TableModel(table), TABLE_SPECIAL, processors=[processor], **options)
    ((answer,),) = generator.fill_ids([[4]])
    return answer


@cache
def answers_of(seed, max_len, penalty):
    table = random_table(6, seed)
    return table, every_answer(table, max_len, penalty)


CASES = [
    [[(0,)]],
    [[(1, 0)]],
    [[(0, 1), (5,)]],  # two spellings of one phrase
    [[(1,)], [(5,)]],
    [[(0, 1)], [(1, 5)]],  # they may overlap
    [[(5, 5)], [(0,)]],
]


@pytest.mark.parametrize("phrases", CASES)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_the_best_constrained_answer(phrases, ordered, seed):
    table, found = answers_of(seed, 4, 0.7)
    complete = has_all_in_order if ordered else has_all
    best, score = next(one for one in found if complete([t for t in one[0] if t != 2], phrases))
    answer = constrained(table, phrases, ordered, beam=150, max_len=4, length_penalty=0.7)
    assert whole(answer) == best
    assert answer.score == pytest.approx(score, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(SPELLINGS, min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from(
        [
            {"beam": 1},
            {"beam": 2},
            {"beam": 5},
            {"sampling": True},
            {"search": "diverse_beam", "beam": 4},
            {"search": "beam_sampling", "beam": 3},
        ]
    ),
)
def test_every_search_gives_answers_that_hold_them(phrases, ordered, seed, options):
    progress = (OrderedProgress if ordered else UnorderedProgress)(phrases)
    room = progress.need(progress.start)
    answer = constrained(random_table(6, seed), phrases, ordered, max_len=max(room, 1) + seed, **options)
    assert (has_all_in_order if ordered else has_all)(answer.tokens, phrases)


def test_banks_bring_a_phrase_where_it_fits_and_not_where_it_must():
    # After 0 comes 1 or the end; 5 is unlikely everywhere, but very unlikely unless it comes first.
    table = random_table(6, 0)
    table[3] = [0.90, 0.05, 0.0, 0.0, 0.0, 0.05]
    table[0] = [0.1, 0.4, 0.4999, 0.0, 0.0, 0.0001]
    table[1] = [0.4, 0.1, 0.4999, 0.0, 0.0, 0.0001]
    table[5] = [0.3, 0.3, 0.4, 0.0, 0.0, 0.0]
    greedy = constrained(table, [[(5,)]], max_len=6)
    assert greedy.tokens.index(5) == 5  # put off as long as it can be
    beam = constrained(table, [[(5,)]], max_len=6, beam=4, length_penalty=0.0)
    assert beam.tokens == [5]
    assert sum(beam.token_logprobs) > sum(greedy.token_logprobs)


def test_a_blanks_own_greatest_length_counts():
    answer = constrained(random_table(6, 1), [[(5, 0)]], max_lens=[3], max_len=9)
    assert holds(answer.tokens[:3], (5, 0))


def test_blanks_without_phrases_are_free_and_states_follow_reordered_hypotheses():
    processor = LexicalConstraints({0: UnorderedProgress([[(5, 6)]]), 1: UnorderedProgress([])})
    everything = set(range(8))
    state = state_of([[[5], [4]], [[5], [4]]], blank=[0, 1], max_len=3)
    assert allowed(run(processor, state)) == [[{5, 6}, {5}], [everything] * 2]
    # Both now go on from the second hypothesis of the step before; nothing told the processor.
    state = state_of([[[4, 5], [4, 4]], [[4, 5], [4, 4]]], blank=[0, 1], max_len=4)
    assert allowed(run(processor, state)) == [[{5, 6}, {5}], [everything] * 2]
    state.max_len = 9  # room enough
    assert allowed(run(processor, state)) == [[everything - {2}] * 2, [everything] * 2]


def test_a_score_is_the_models_own_and_finite():
    answer = constrained(random_table(6, 2), [[(5, 1)]], beam=3, max_len=5)
    assert answer.score == pytest.approx(sum(answer.token_logprobs) / len(answer.token_logprobs), abs=1e-6)
    assert math.isfinite(answer.score)
