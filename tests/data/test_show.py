"""ftk-data show: what a person sees of a document and its samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from number_corpus import CLS, EOS, FIRST_WORD, FULL_STOP, NumberTokenizer, random_documents

from ftk.data.blank_config import BlankInfillingConfig
from ftk.data.blank_infilling import build_sample
from ftk.data.documents import DocumentList
from ftk.data.show import describe_sample, display_width, mask_picture, pad, printable, show, wrap_words
from ftk.data.spans import Blanks
from ftk.errors import UserError

NAMES = {2: "[CLS]", 3: "[MASK]", 4: "[sMASK]", 5: "[gMASK]", 6: "<s>", 7: "</s>", 0: "<eos>", FULL_STOP: "."}


class NamedTokenizer(NumberTokenizer):
    """Words are letters and Chinese characters; command tokens are written by their names."""

    def token_text(self, token):
        return NAMES.get(token, f"<unused {token}>")

    def decode(self, ids):
        return "".join(
            NAMES.get(token) or (chr(token - FIRST_WORD + ord("a")) if token < FIRST_WORD + 26 else chr(0x4E00 + token))
            for token in ids
        )


TOKENIZER = NamedTokenizer()


def sample_of(spans, order):
    text = np.array([CLS, 20, 21, 22, 23, 24, FULL_STOP, 60, EOS])
    spans = np.array(spans, dtype=np.int64)
    order = np.array(order)
    sample = build_sample(text, spans, spans[order], special=TOKENIZER.special)
    return text, Blanks(0, spans, order, True), sample


def test_a_sample_as_a_person_sees_it():
    text, blanks, sample = sample_of([[1, 3], [7, 8]], [1, 0])
    assert (
        describe_sample(text, blanks, sample, TOKENIZER, 100)
        == """\
2 blanks, 3 of 9 tokens (33 %); sample: 8 context and 5 answer tokens

text with its blanks, each with the number of its answer
  [CLS] [MASK](2) cde. [MASK](1) <eos>

answers, in their order
  (1) 丼</s>
  (2) ab</s>

what the model gets (position: place in the context; block: place in the answer)
  input     [CLS] [MASK] c d e . [MASK] <eos> <s> 丼   <s> a b
  target                                      丼  </s> a   b </s>
  position  0     1      2 3 4 5 6      7     6   6    1   1 1
  block     0     0      0 0 0 0 0      0     1   2    1   2 3

who sees whom (rows see columns; █ yes, · no; c: context, 1, 2, …: answers)
    c c c c c c c c 1 1 2 2 2
  c ████████████████··········
  c ████████████████··········
  c ████████████████··········
  c ████████████████··········
  c ████████████████··········
  c ████████████████··········
  c ████████████████··········
  c ████████████████··········
  1 ██████████████████········
  1 ████████████████████······
  2 ██████████████████████····
  2 ████████████████████████··
  2 ██████████████████████████"""
    )


def test_columns_stand_under_each_other_and_lines_keep_to_the_width():
    text, blanks, sample = sample_of([[1, 3], [7, 8]], [1, 0])
    lines = describe_sample(text, blanks, sample, TOKENIZER, 44).split("\n")
    first, last = (
        lines.index(next(line for line in lines if line.startswith(start))) for start in ("what the model", "who sees")
    )
    table = lines[first + 1 : last]
    assert all(display_width(line) <= 44 for line in table)
    assert sum(line.startswith("  input") for line in table) > 1
    shown = " ".join(line[12:] for line in table if line.startswith("  position")).split()
    assert shown == [str(place) for place in sample.position_ids[0]]


def test_a_long_samples_picture_is_small_and_shaded():
    text = np.r_[CLS, np.full(400, 30), EOS]
    spans = np.array([[50, 150]])
    sample = build_sample(text, spans, spans, special=TOKENIZER.special)
    picture = mask_picture(sample, Blanks(0, spans, np.array([0]), True), largest=20)
    heading, _, *rows = picture
    assert len(rows) <= 20
    assert "tokens a cell" in heading
    assert rows[0].endswith("·")
    assert set(rows[-1][4:-2]) == {"█"}
    assert any("▓" in row or "▒" in row or "░" in row for row in rows)


def test_one_sample_is_shown_for_each_objective_of_the_options():
    documents = random_documents([40, 0, 900])
    both = show(documents, TOKENIZER, BlankInfillingConfig(seq_length=64, bert_prob=0.5, gap_sentence_prob=0.0))
    assert both.startswith("document 0 of 3: 40 tokens\n")
    assert [name in both for name in ("token objective:", "sentence objective:", "document objective:")] == [
        True,
        False,
        True,
    ]
    assert "[MASK](1)" in both
    assert "[gMASK](1)" in both
    long = show(documents, TOKENIZER, BlankInfillingConfig(seq_length=64), index=2)
    assert "… (400 more tokens)" in long
    assert show(documents, TOKENIZER, BlankInfillingConfig(seq_length=64), index=2) == long
    assert show(documents, TOKENIZER, BlankInfillingConfig(seq_length=64), index=2, draw=1) != long


@pytest.mark.parametrize(("index", "message"), [(3, "0 to 2"), (-1, "0 to 2"), (1, "is empty")])
def test_a_document_that_is_not_there_is_refused(index, message):
    with pytest.raises(UserError, match=message):
        show(random_documents([5, 0, 5]), TOKENIZER, BlankInfillingConfig(), index=index)


def test_an_empty_corpus_is_refused():
    with pytest.raises(UserError, match="there are 0 documents"):
        show(DocumentList([]), TOKENIZER, BlankInfillingConfig())


@pytest.mark.parametrize(("text", "columns"), [("abc", 3), ("中文", 4), ("e\u0301", 1), ("，", 2), ("ｱ", 1), ("", 0)])
def test_display_width(text, columns):
    assert display_width(text) == columns
    assert display_width(pad(text, 6)) == 6


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\nb\x1b[31m\u2028\u202e") == "a⏎b�[31m��"


@given(st.text(alphabet=st.sampled_from("ab 中文，é\u0301"), max_size=200), st.integers(22, 60))
@settings(max_examples=200, deadline=None)
def test_wrapping_keeps_the_text_and_the_width(text, width):
    lines = wrap_words(text, width, indent="  ")
    assert all(display_width(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_the_command(command, data_bin):
    shown = command("ftk-data", "show", data_bin, "--task", "glm_blank", "--seq-length", "32", "--index", "3")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("document 3 of ")
    assert "who sees whom" in shown.stdout
    for arguments, message in (
        (["--index", "99999"], "--index 99999: there are"),
        (["--index", "-1"], "index is -1"),
        (["--split", "test"], "no split 'test'"),
        (["--bert-prob", "2"], "bert_prob is 2.0"),
    ):
        refused = command("ftk-data", "show", data_bin, *arguments)
        assert refused.returncode == 2, refused.stderr
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
