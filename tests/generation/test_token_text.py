"""The parts of an answer's text that its tokens wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from ftk.generation.search import Answer
from ftk.generation.streaming import AnswerText, whole_characters
from ftk.generation.token_text import texts_behind, token_texts
from ftk.tokenizers.hf import decoded

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


def each_byte(raw):
    """As SentencePiece writes bytes: each that belongs to no character is one U+FFFD."""
    return "".join("\ufffd" if "\udc80" <= one <= "\udcff" else one for one in raw.decode("utf-8", "surrogateescape"))


FALLBACK = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
DECODERS = {
    "runs": lambda raw: raw.decode("utf-8", "replace"),
    "bytes": each_byte,
    "fallback": lambda raw: decoded(FALLBACK, [f"<0x{one:02X}>" if one > 127 else chr(one) for one in raw]),
}
HALF = "\ufffd"


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    ("tokens", "texts"),  # the bytes of each token, and its text where a run of bytes is one U+FFFD
    [
        ("61 62", ["a", "b"]),
        ("E4 B8 AD 61", ["", "", "中", "a"]),
        ("F0 9F 99 82", ["", "", "", "🙂"]),
        ("63 63 FF FE FF FF", ["c", "c", HALF, HALF, HALF, HALF]),
        ("63 63 F0 9F 99 F0", ["c", "c", HALF, "", "", HALF]),
        ("FF 61", [HALF, "a"]),
        ("80 BF 80 BF 80", [HALF, HALF, HALF, HALF, HALF]),
        ("E4 E4 E4 E4 B8 AD", [HALF, HALF, HALF, "", "", "中"]),
        ("E4 B8 61", [HALF, "", "a"]),
        ("F0 9F 99 61", [HALF, "", "", "a"]),
        ("F0 9F 99 F0 9F 99 82", [HALF, "", "", "", "", "", "🙂"]),
        ("61 E4 B8", ["a", HALF, ""]),
        ("61 F0", ["a", HALF]),
        ("E4 B8 AD E4", ["", "", "中", HALF]),
        ("E4 B8 AD FF E4 B8 AD", ["", "", "中", HALF, "", "", "中"]),
        ("ED A0 80 61", [HALF, HALF, HALF, "a"]),  # a surrogate
        ("C0 AF E0 80 80 61", [HALF, HALF, HALF, HALF, HALF, "a"]),  # longer than need be
        ("F4 90 80 80 61", [HALF, HALF, HALF, HALF, "a"]),  # behind the last character
        ("EF BF BD EF BF BD 61", [HALF, "", "", HALF, "", "", "a"]),  # U+FFFD itself
        ("61E4 B8AD62 FF63", ["a", "中b", f"{HALF}c"]),
        ("E4 B8ADE4 B8ADE4 B8 61", ["", "中", f"中{HALF}", "", "a"]),
        ("FFFFFFFF FFFFFFFF 61", [HALF * 4, HALF * 4, "a"]),
    ],
)
def test_tokens_have_the_same_texts_in_streams_and_in_whole_answers(name, tokens, texts):
    pieces = [bytes.fromhex(one) for one in tokens.split()]

    def decode(ids):
        return DECODERS[name](b"".join(pieces[one] for one in ids))

    ids = [*range(len(pieces))]
    found = texts_behind(decode, (), ids)
    assert "".join(found) == decode(ids)
    assert name != "runs" or found == texts
    line, streamed = AnswerText(decode, whole_characters, strip=str), []
    for new in (*(line.add([one], [0.0]) for one in ids), line.rest(decode(ids), Answer(ids, [0.0] * len(ids), 0.0))):
        own = texts_behind(decode, ids[: len(streamed)], new.tokens)
        assert "".join(own) == new.text
        streamed += own
    assert streamed == found
