"""Stop strings: found however they are cut into tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftk.generation.processors.stop_strings import StopStrings
from tests.generation.processors.helpers import allowed, run, state_of

# Tokens of bytes; 3 and 4 are the halves of "é".
PIECES = {0: b"a", 1: b"ab", 2: b"", 3: b"\xc3", 4: b"\xa9", 5: b"b", 6: b"ba", 7: b"\n"}


def decode(ids):
    return b"".join(PIECES[one] for one in ids).decode("utf-8", "replace")


TOKENS = st.lists(st.sampled_from([0, 1, 3, 4, 5, 6, 7]), min_size=1, max_size=30)
STOPS = st.lists(st.sampled_from(["aba", "é", "b\n", "aa", "\n\n", "éa"]), min_size=1, max_size=3)


@given(TOKENS, STOPS)
def test_an_answer_ends_as_soon_as_its_text_holds_a_stop_string(tokens, stops):
    processor = StopStrings(stops, decode)
    for step in range(len(tokens) + 1):
        scores = run(processor, state_of([[tokens[:step]]]))
        there = any(stop in decode(tokens[:step]) for stop in stops)
        assert allowed(scores) == [[{2} if there else set(range(8))]]
        if there:
            assert scores[0, 0, 2] == 0.0
            return


@given(TOKENS, STOPS)
def test_what_counts_is_the_text_in_front_of_the_first_stop_string(tokens, stops):
    stop = StopStrings(stops, decode)
    text = decode(tokens)
    places = [text.find(one) for one in stops if one in text]
    expected = text[: min(places)] if places else text
    assert stop.cut(text) == expected
    kept = tokens[: stop.length(0, tokens)]
    assert stop.cut(decode(kept)) == expected
    if not places:
        assert kept == tokens


def test_tokens_behind_the_stop_are_cut_off_and_the_stop_itself_where_it_has_its_own():
    stop = StopStrings(["é"], decode)
    assert stop.length(0, [0, 3, 4, 5]) == 1
    assert StopStrings(["b"], decode).length(0, [0, 6, 5]) == 1
    assert StopStrings(["bb"], decode).length(0, [0, 1, 5, 0]) == 3  # "ab" holds text and stop: both stay
