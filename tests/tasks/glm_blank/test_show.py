"""ftk-data show: what a person sees of a document and its samples."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.errors import UserError
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset
from ftk.tasks.glm_blank.samples.infilling import build_sample
from ftk.tasks.glm_blank.samples.show import (
    Shown,
    describe_sample,
    mask_picture,
    printable,
    samples_to_show,
    show,
    wrap_words,
)
from ftk.tasks.glm_blank.samples.show_html import show_html
from ftk.tasks.glm_blank.samples.spans import Blanks
from ftk.terminal import display_width
from tests.data.number_corpus import CLS, EOS, FIRST_WORD, FULL_STOP, NumberTokenizer, random_documents

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
    return Shown(0, False, text, Blanks(0, spans, order, True), sample, 1)


def test_a_sample_as_a_person_sees_it():
    shown = sample_of([[1, 3], [7, 8]], [1, 0])
    assert (
        describe_sample(shown, TOKENIZER, 100)
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
    shown = sample_of([[1, 3], [7, 8]], [1, 0])
    lines = describe_sample(shown, TOKENIZER, 44).split("\n")
    first, last = (
        lines.index(next(line for line in lines if line.startswith(start))) for start in ("what the model", "who sees")
    )
    table = lines[first + 1 : last]
    assert all(display_width(line) <= 44 for line in table)
    assert sum(line.startswith("  input") for line in table) > 1
    positions = " ".join(line[12:] for line in table if line.startswith("  position")).split()
    assert positions == [str(place) for place in shown.sample.position_ids[0]]


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


@pytest.mark.parametrize(
    ("lengths", "index", "message"),
    [([5, 0, 5], 3, "0 to 2"), ([5, 0, 5], -1, "0 to 2"), ([5, 0, 5], 1, "is empty"), ([], 0, "there are 0 documents")],
)
def test_a_document_that_is_not_there_is_refused(lengths, index, message):
    with pytest.raises(UserError, match=message):
        show(random_documents(lengths), TOKENIZER, BlankInfillingConfig(), index=index)


@pytest.mark.parametrize("packed", [False, True])
def test_a_document_that_is_too_long_is_said_once(caplog, packed):
    options = BlankInfillingConfig(seq_length=16, bert_prob=0.4, gap_sentence_prob=0.3, sample_one_document=True)
    caplog.set_level("INFO")
    shown = list(samples_to_show(random_documents([40]), TOKENIZER, options, packed=packed))
    assert len(shown) == 3
    assert caplog.text.count("1 of 1 documents have more than the 14 tokens") == 1


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\nb\x1b[31m\u2028\u202e") == "a⏎b�[31m��"


@given(st.text(alphabet=st.sampled_from("ab 中文，é\u0301"), max_size=200), st.integers(22, 60))
@settings(max_examples=200, deadline=None)
def test_wrapping_keeps_the_text_and_the_width(text, width):
    lines = wrap_words(text, width, indent="  ")
    assert all(display_width(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


SHOW = ("ftk-data", "show", "--task", "glm_blank")


def test_the_command(command, data_bin):
    shown = command(*SHOW, data_bin, "--seq-length", "32", "--index", "3", code=0)
    assert shown.stdout.startswith("document 3 of ")
    assert "who sees whom" in shown.stdout
    for arguments, message in (
        (["--index", "99999"], "--index 99999: there are"),
        (["--index", "-1"], "--index is -1; it must be at least 0"),
        (["--split", "test"], "no split 'test'"),
        (["--bert-prob", "2"], "--bert-prob is 2; it must be at most 1"),
    ):
        refused = command(*SHOW, data_bin, *arguments, code=2)
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr


def page_data(page):
    """What the page's script reads."""
    return json.loads(page.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def html_of(documents, tokenizer=TOKENIZER, source="ftk-data show", config=None, **which):
    config = config or BlankInfillingConfig(seq_length=64)
    return show_html(list(samples_to_show(documents, tokenizer, config, **which)), tokenizer, source)


def test_the_page_holds_every_sample_and_loads_nothing():
    documents = random_documents([40, 0, 900, 12, 30], sentence_length=5)
    config = BlankInfillingConfig(seq_length=64)
    page = html_of(documents, num_samples=3, draw=2)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|src=|<link|<iframe|<img|\bfetch\b|XMLHttp|import\(", page)
    assert "default-src 'none'" in page
    samples = page_data(page)["samples"]
    assert [(made["index"], made["objective"]) for made in samples] == [(n, o) for n in (0, 2, 3) for o in (0, 1, 2)]
    for made, shown in zip(samples, samples_to_show(documents, TOKENIZER, config, num_samples=3, draw=2), strict=True):
        assert made["positions"] == shown.sample.position_ids[0].tolist()
        assert made["blocks"] == shown.sample.position_ids[1].tolist()
        assert made["context"] == shown.sample.context_length
        assert [target is not None for target in made["targets"]] == shown.sample.loss_mask.tolist()
        lengths = {len(made[name]) for name in ("tokens", "targets", "positions", "blocks", "answers", "masks")}
        assert lengths == {len(shown.sample.tokens)}
        assert "".join(piece["text"] for piece in made["pieces"]) == TOKENIZER.decode(shown.text.tolist())
        blanks = [place for place, answer in enumerate(made["masks"]) if answer]
        assert sorted(made["masks"])[-len(blanks) :] == list(range(1, len(made["spans"]) + 1))
        for place in blanks:
            assert shown.sample.tokens[place] in (3, 4, 5)
            answers = [n for n, answer in enumerate(made["answers"]) if answer == made["masks"][place]]
            assert {made["positions"][n] for n in answers} == {made["positions"][place]}


class HostileTokenizer(NamedTokenizer):
    """Every word is an attack."""

    attacks = (
        "</script><script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<!--<script>",
        "]]>&lt;",
        "\u2028';alert(1)//",
        "%DATA%",
    )

    def decode(self, ids):
        return "".join(NAMES.get(token) or self.attacks[token % len(self.attacks)] for token in ids)


def test_hostile_text_stays_text():
    plain, page = (
        html_of(random_documents([40]), maker, maker.decode([25])) for maker in (TOKENIZER, HostileTokenizer())
    )
    inside = page.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&\u2028") & set(inside)
    for mark in ("<", ">", "<script", "</script", "<!--", "<img"):
        assert page.count(mark) == plain.count(mark)
    assert page.count("%DATA%") == inside.count("%DATA%")
    data = page_data(page)
    assert "</script><script>alert(1)</script>" in str(data["samples"])
    assert data["source"] == "<img src=x onerror=alert(1)>"


def test_packed_samples_are_those_of_training():
    documents, config = random_documents([20] * 60), BlankInfillingConfig(seq_length=64, document_mask=True)
    (shown, *_) = samples_to_show(documents, TOKENIZER, config, packed=True, index=4)
    only = dataclasses.replace(config, bert_prob=1.0, gap_sentence_prob=0.0)
    sample = GLMBlankDataset(documents, TOKENIZER, only, 1).sample(1, 4)
    assert np.array_equal(shown.sample.tokens, sample["tokens"])
    assert shown.num_documents == sample["document_ids"].max() + 1 == 3
    made = page_data(html_of(documents, config=config, packed=True, index=4))["samples"]
    assert made[0]["document_ids"] == sample["document_ids"].tolist()
    text = show(documents, TOKENIZER, config, packed=True, index=4)
    assert text.startswith("sample 4, 3 documents, token objective: ")
    picture = mask_picture(shown.sample, shown.blanks, largest=200)
    assert picture[2][4:].endswith("·")
    assert "·█" in picture[30]
    with pytest.raises(UserError, match="there are 19 packed samples, 0 to 18"):
        show(documents, TOKENIZER, config, packed=True, index=19)


def test_the_page_by_command(command, data_bin, tmp_path):
    made = command(*SHOW, data_bin, "--seq-length", "32", "--html", tmp_path / "out.html", code=0)
    assert made.stdout == f"wrote {tmp_path}/out.html\n"
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert len(page_data(page)["samples"]) == 9
    two = ("--num-samples", "2", "--packed", "--document-mask")
    assert command(*SHOW, data_bin, *two, "--html", tmp_path / "out.html").returncode == 0
    data = page_data((tmp_path / "out.html").read_text(encoding="utf-8"))
    assert [made["packed"] for made in data["samples"]] == [True] * 6
    assert command(*SHOW, data_bin, "--num-samples", "2").stdout.count("\ndocument 1 of ") == 1
    for arguments, message in (
        (["--html", tmp_path / "missing" / "out.html"], "No such file or directory"),
        (["--html", tmp_path], "directory"),
        (["--num-samples", "0"], "--num-samples is 0; it must be at least 1"),
    ):
        refused = command(*SHOW, data_bin, *arguments, code=2)
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
def test_the_page_in_a_browser(tmp_path):
    """The script runs, draws every sample, and runs nothing of the text."""
    (tmp_path / "page.html").write_text(html_of(random_documents([40]), HostileTokenizer()), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += f" --disable-component-update --disable-sync --user-data-dir={tmp_path}/profile --dump-dom"
    shown = subprocess.run(
        ["chromium", *flags.split(), f"file://{tmp_path}/page.html#sample-0-20"],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    assert shown.count("<canvas") == 3
    body = shown.split('<main id="samples">')[1].split("</main>")[0]
    assert "<script" not in body
    assert "<img" not in body
    assert "&lt;img src=x onerror=alert(1)&gt;" in body
    assert re.search(r'class="token[^"]* me"', body)
    assert re.search(r'class="said">“[^<]+ sees \d+ tokens', body) or "看得到" in body
