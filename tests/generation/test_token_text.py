"""The parts of an answer's text that its tokens wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftk.generation.token_text import token_texts

PIECES = {
    1: " red",
    2: " fox",
    3: "es",
    4: b"\xe2\x82",  # two bytes of the euro sign
    5: b"\xac",
    6: b"\xf0\x9f\xa6",  # three of a fox
    7: b"\x8a",
    8: "",
    9: " ",
    10: "\n",
    11: b"\xff",
}


def decode(tokens):
    """Byte-level, as BPE decodes: what is no character yet is U+FFFD."""
    raw = b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in (PIECES[one] for one in tokens))
    return raw.decode("utf-8", errors="replace")


def parts(tokens, words=None):
    logprobs = [-float(number) for number in range(len(tokens) + 1)]  # one more for the end token
    words = decode(tokens).strip() if words is None else words
    return [(one.text, one.logprobs) for one in token_texts(words, tokens, logprobs, decode)]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([1], [("red", (-0.0,))]),
        ([1, 2, 3], [("red", (-0.0,)), (" fox", (-1.0,)), ("es", (-2.0,))]),
        ([4, 5], [("€", (-0.0, -1.0))]),
        ([1, 6, 7, 3], [("red", (-0.0,)), ("🦊", (-1.0, -2.0)), ("es", (-3.0,))]),
        ([8, 1, 8, 2], [("red", (-0.0, -1.0)), (" fox", (-2.0, -3.0))]),
        ([1, 9, 10], [("red", (-0.0,))]),  # white space around an answer is not shown
        ([9, 1], [("red", (-0.0, -1.0))]),
        ([1, 11, 2], [("red", (-0.0,)), ("\ufffd", (-1.0,)), (" fox", (-2.0,))]),  # no character it stays
        ([1, 4], [("red", (-0.0,)), ("\ufffd", (-1.0,))]),  # half a one at the end, too
    ],
)
def test_each_token_has_its_own_characters(tokens, expected):
    assert parts(tokens) == expected


def test_what_a_stop_text_has_cut_off_is_nowhere():
    assert parts([1, 2, 3], "red f") == [("red", (-0.0,)), (" f", (-1.0, -2.0))]
    assert parts([1, 2, 3], "red") == [("red", (-0.0,))]
    assert parts([1], "") == []


def test_what_is_written_otherwise_in_its_place_is_one_part():
    assert parts([3, 2], "-es fox") == [("-es fox", (-0.0, -1.0))]
    assert parts([], "something") == [("something", (-0.0,))]  # a label, which has no tokens


@given(st.lists(st.sampled_from(sorted(PIECES)), max_size=12))
def test_joined_they_are_the_text_and_no_token_is_in_two_of_them(tokens):
    found = parts(tokens)
    assert "".join(text for text, _ in found) == decode(tokens).strip()
    told = [logprob for _, logprobs in found for logprob in logprobs]
    assert told == [-float(number) for number in range(len(told))]
    assert all(text and logprobs for text, logprobs in found)
