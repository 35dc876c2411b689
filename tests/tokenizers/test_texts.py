"""The quick look at many texts before a library gets them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftk.tokenizers._texts import all_plain

ODD = [
    "",
    "a",
    " ",
    " a",
    "\u3000",
    "\x85b",
    "\n\t",
    "é",
    "\ud7ff",
    "\ue000",
    "\ud800",
    "帝\udfff",
    "😀",
    "😀\udbff",
    "\x1c",
]


@pytest.mark.parametrize("text", ODD)
def test_one_text(text):
    plain = not text.isspace() and not any(0xD800 <= ord(letter) < 0xE000 for letter in text)
    assert all_plain([text]) is plain
    assert all_plain(["a", text, "b"]) is plain
    assert all_plain(("a", text)) is plain


@given(st.lists(st.text(st.characters(codec=None) | st.sampled_from(" \u3000\ud83d\ude00")), max_size=5))
def test_many_texts(texts):
    expected = not any(text.isspace() for text in texts)
    try:
        "|".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        expected = False
    assert all_plain(texts) is expected
