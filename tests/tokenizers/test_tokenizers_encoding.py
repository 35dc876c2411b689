"""Encoding equals the slow original on any text, never crashes, and makes no command token of plain text."""

from __future__ import annotations

import json
import unicodedata
from array import array
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import slow_tokenizers as slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftk.tokenizers import CommandToken, Tokenizer, build_tokenizer
from ftk.tokenizers.base import well_formed

ODD = [
    "", " ", "   ", "\n\n", "\t", "\r\n", "\x0b\x0c", "\x1c\x1d\x1e\x1f", "\x85",
    "\xa0", "\u2028", "\u2029", "\u3000", "\u200b", "\ufeff", "\xad", "\0",
    "\ufffd", "İ", "ΟΔΥΣΣΕΥΣ", "ΣΑΣ Σ. Σ-Σ'Σ", "ẞß", "Å\u212b", "e\u0301", "ﬁ½",
    "㍿", "豈", "一丁𠀀", "한국어", "각", "👨‍👩‍👧", "🇩🇪", "🤩", "\u0301\u0301", "a\u0301" * 60,
    "x" * 100, "x" * 101, "'s'S'll don't", "1a2b３٣Ⅷ½", "a_b-c", "$+<=>^`|~",
    "«»“”—…、。", "\U0001f9ff", "\U000e0001", "\ue000", "ÀÉÎ ñ", "[MA\0SK]", "[mask]",
    "##ing ##", "▁x", "Ġword Ċ", "<s></s><unk><pad><mask>", "<0x41>",
    "[unused1] [PAD][UNK]",
]  # fmt: skip
NAMES = [
    "[MASK]", "[gMASK]", "[sMASK]", "[CLS]", "[SEP]", "[UNK]", "[PAD]", "[dBLOCK]",
    "[MASK1]", "[MASK4]", "<|endoftext|>", "<|startofpiece|>", "<|endofpiece|>",
    "<|startofpiece2|>", "<pad>", "<eos>", "<MASK>", "<sop>", "[MASK", "MASK]",
    "<|",
]  # fmt: skip
# Characters on which Unicode 3.2 and Python's Unicode agree: the libraries' tables are of other versions.
SETTLED = [
    chr(code)
    for code in range(0x110000)
    if unicodedata.ucd_3_2_0.category(chr(code)) not in ("Cn", "Cs")
    and unicodedata.ucd_3_2_0.category(chr(code)) == unicodedata.category(chr(code))
]
MODEST = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def texts(alphabet: st.SearchStrategy[str] | list[str] | None = None) -> st.SearchStrategy[str]:
    """Odd words, command-token names, white space and random characters in any order."""
    free = st.text(alphabet if alphabet is not None else st.characters(), max_size=12)
    parts = st.one_of(free, st.sampled_from(ODD), st.sampled_from(NAMES), st.sampled_from([" ", "  ", "\n", " \t "]))
    return st.lists(parts, max_size=8).map("".join)


@given(text=texts())
@MODEST
def test_wordpiece_equals_the_original(text: str, tiny_bert: Path) -> None:
    vocab = {token: i for i, token in enumerate(tiny_bert.read_text(encoding="utf-8").split("\n")[:-1])}
    for casing in ("uncased", "cased"):
        tokenizer = _cached("bert_wordpiece", tiny_bert, casing=casing)
        assert tokenizer.encode(text) == slow.bert_ids(well_formed(text), vocab, casing == "uncased")


@given(text=texts(st.sampled_from(SETTLED)))
@MODEST
def test_byte_level_bpe_equals_the_original(text: str, tiny_gpt2: Path) -> None:
    expected = slow.gpt2_ids(text, *_gpt2_tables(tiny_gpt2, "vocab.json", "merges.txt")) if text.strip() else []
    assert _cached("gpt2_bpe", tiny_gpt2).encode(text) == expected


@pytest.mark.parametrize("text", [*ODD, *NAMES, "".join(ODD), " ".join(ODD)])
def test_published_vocabularies_equal_the_original(text: str, published: Path) -> None:
    lines = (published / "bert-base-uncased-vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
    bert = _cached("bert_wordpiece", published)
    assert bert.encode(text) == slow.bert_ids(text, {token: i for i, token in enumerate(lines)})
    gpt2 = _cached("gpt2_bpe", published)
    tables = _gpt2_tables(published, "gpt2-vocab.json", "gpt2-merges.txt")
    assert gpt2.encode(text) == (slow.gpt2_ids(text, *tables) if text.strip() else [])


def test_every_settled_character_between_letters_equals_the_original(tiny_bert: Path, tiny_gpt2: Path) -> None:
    text = "".join(f"a{character}b" for character in SETTLED)
    vocab = {token: i for i, token in enumerate(tiny_bert.read_text(encoding="utf-8").split("\n")[:-1])}
    assert _cached("bert_wordpiece", tiny_bert).encode(text) == slow.bert_ids(text, vocab)
    tables = _gpt2_tables(tiny_gpt2, "vocab.json", "merges.txt")
    assert _cached("gpt2_bpe", tiny_gpt2).encode(text) == slow.gpt2_ids(text, *tables)


@given(text=texts())
@MODEST
def test_prompts_are_split_as_in_the_original(text: str, tiny: Tokenizer) -> None:
    text = well_formed(text)
    rows = [(token.text, token.lstrip) for token in tiny.command_tokens]
    parts = slow.split_on_tokens(text, rows) if text.strip() else []
    by_text = {token.text: token for token in tiny.command_tokens}
    expected = [i for part in parts for i in ([by_text[part].id] if part in by_text else tiny._encode_text(part))]
    assert tiny.encode(text, command_tokens=True) == expected


@given(text=texts())
@MODEST
def test_a_corpus_cannot_smuggle_in_a_command_token(text: str, tiny: Tokenizer) -> None:
    # unk may come out of plain text in BERT, where it stands for words that cannot be written
    forbidden = {token.id for token in tiny.command_tokens if token.name != "unk"}
    assert not forbidden & set(tiny.encode(text))
    assert not forbidden & set(tiny.encode("".join(NAMES) + text + " ".join(NAMES)))


@pytest.mark.parametrize("name", ["bert_wordpiece", "gpt2_bpe", "sentencepiece"])
def test_published_vocabularies_cannot_be_smuggled_into(name: str, published: Path) -> None:
    tokenizer = _cached(name, published)
    forbidden = {token.id for token in tokenizer.command_tokens if token.name != "unk"}
    if name == "sentencepiece":
        forbidden |= {1, 2}  # the model's own <s> and </s>
    for word in [*NAMES, *ODD]:
        for text in (word, f"a{word}b", f"a {word} b"):
            assert not forbidden & set(tokenizer.encode(text)), text


def test_a_tokenizer_says_what_it_is(tiny: Tokenizer) -> None:
    assert repr(tiny).startswith(f"<tokenizer {tiny.name}: {tiny.vocab_size} tokens, ")
    assert f"mask={tiny.token_text(tiny.special.mask)!r}" in repr(tiny)


def test_a_command_token_is_one_id_only_where_asked_for(tiny: Tokenizer) -> None:
    for token in tiny.command_tokens:
        assert tiny.encode(token.text, command_tokens=True) == [_later_with_text(tiny, token).id]
        assert len(tiny.encode(token.text)) > 1


def test_white_space_is_swallowed_on_the_left_of_a_blank_only(tiny_gpt2: Path) -> None:
    tokenizer = _cached("gpt2_bpe", tiny_gpt2)
    special = tokenizer.special
    space = tokenizer.encode("x y")[1]
    assert space == tokenizer.encode("a ")[1]
    assert tokenizer.encode("[MASK] \u3000\n[gMASK]", command_tokens=True) == [special.mask, special.gmask]
    assert tokenizer.encode("[CLS] [SEP]", command_tokens=True) == [special.cls, space, special.sep]
    assert tokenizer.encode("[MASK] ", command_tokens=True) == [special.mask, space]
    assert tokenizer.encode(" \n[MASK]", command_tokens=True) == [special.mask]


@given(batch=st.lists(texts(), max_size=6))
@MODEST
def test_a_batch_equals_its_members(batch: list[str], tiny: Tokenizer) -> None:
    assert tiny.encode_batch(batch) == [tiny.encode(text) for text in batch]
    rows = tiny.encode_rows(batch)
    assert [row if isinstance(row, list) else np.asarray(row).tolist() for row in rows] == tiny.encode_batch(batch)


@pytest.mark.parametrize(
    "inside",
    [None, lambda texts, num_threads: [], lambda texts, *more: [], lambda texts, *more: [array("i", [5])] * len(texts)],
    ids=["absent", "other arguments", "nothing", "other ids"],
)
def test_sentencepiece_encodes_where_the_library_looks_different_inside(tiny_sentencepiece, monkeypatch, inside):
    tokenizer, changed = (build_tokenizer("sentencepiece", path=tiny_sentencepiece) for _ in range(2))
    batch = ["The sun", "", "\u56fe\u4e66\u9986 1"]
    rows = [np.asarray(row).tolist() for row in tokenizer.encode_rows(batch)]
    assert rows == [tokenizer.encode(text) for text in batch]
    other = SimpleNamespace(encode=changed._processor.encode, _processor=SimpleNamespace(_EncodeAsBufferBatch=inside))
    monkeypatch.setattr(changed, "_processor", other)
    assert [row.tolist() for row in changed.encode_rows(batch)] == rows


@given(text=st.text(st.one_of(st.characters(), st.characters(categories=["Cs"])), max_size=30))
@MODEST
def test_nothing_crashes_and_ids_are_in_range(text: str, tiny: Tokenizer) -> None:
    for ids in (tiny.encode(text), tiny.encode(text, command_tokens=True)):
        assert all(0 <= id_ < tiny.vocab_size for id_ in ids)
        tiny.decode(ids)


def test_hostile_files_are_encoded(hostile: Path, tiny: Tokenizer) -> None:
    files = [file for file in sorted(hostile.glob("[0-2]*.txt")) if file.stat().st_size < 100_000]
    assert len(files) > 20
    forbidden = {token.id for token in tiny.command_tokens if token.name != "unk"}
    for file in files:
        for errors in ("replace", "surrogateescape"):
            text = file.read_bytes().decode("utf-8", errors)
            assert not forbidden & set(tiny.encode(text)), file
            lines = text.split("\n")
            assert tiny.encode_batch(lines) == [tiny.encode(line) for line in lines], file


def test_a_long_word_without_spaces_is_encoded(tiny: Tokenizer) -> None:
    for text in ("a" * 500_000, "中" * 125_000, "[MASK]" * 25_000):
        assert tiny.encode(text)


@given(ids=st.lists(st.integers(0, 640), max_size=40))
@MODEST
def test_any_id_below_the_padded_size_decodes(ids: list[int], tiny: Tokenizer) -> None:
    assert tiny.padded_vocab_size() <= 640
    tiny.decode(ids)
    assert all(isinstance(tiny.token_text(id_), str) for id_ in ids)


def test_padding_decodes_to_nothing_and_says_so(tiny: Tokenizer) -> None:
    last = tiny.padded_vocab_size() - 1
    if last >= tiny.vocab_size:
        assert tiny.decode([last]) == ""
        assert tiny.token_text(last) == f"<unused {last}>"


@given(text=texts())
@MODEST
def test_byte_level_bpe_is_lossless(text: str, tiny_gpt2: Path, tiny_roberta: Path) -> None:
    if text.strip():
        for path in (tiny_gpt2, tiny_roberta):
            tokenizer = _cached("gpt2_bpe", path)
            assert tokenizer.decode(tokenizer.encode(text)) == well_formed(text)


@given(text=texts())
@MODEST
def test_trained_sentencepiece_loses_only_extra_spaces(text: str, tiny_sentencepiece: Path) -> None:
    tokenizer = _cached("sentencepiece", tiny_sentencepiece)
    text = text.replace("▁", "_")  # SentencePiece's own sign for a space
    ids = tokenizer.encode(text)
    assert 0 not in ids  # <unk>
    words = [word for word in well_formed(text).split(" ") if word]
    assert tokenizer.decode(ids) == (" ".join(words) if text.strip() else "")


def test_byte_level_decoding_marks_broken_characters(tiny_gpt2: Path) -> None:
    tokenizer = _cached("gpt2_bpe", tiny_gpt2)
    assert tokenizer.decode([0xE4, tokenizer.special.mask]) != ""
    assert tokenizer.decode([*tokenizer.encode("é")[:1], tokenizer.special.mask]) == "\ufffd[MASK]"


def test_bert_joins_pieces_to_whatever_stands_before(tiny_bert: Path) -> None:
    tokenizer = _cached("bert_wordpiece", tiny_bert)
    un, able = tokenizer.encode("unable")
    assert tokenizer.decode([able]) == "##able"
    assert tokenizer.decode([un, able, tokenizer.special.mask, able]) == "unable [MASK]able"


def test_sentencepiece_keeps_command_tokens_between_pieces(tiny_sentencepiece: Path) -> None:
    tokenizer = _cached("sentencepiece", tiny_sentencepiece)
    ids = tokenizer.encode("the sea [MASK] shells[SEP]", command_tokens=True)
    assert tokenizer.decode(ids) == "the sea[MASK]shells[SEP]"


def test_where_two_command_tokens_share_an_id_the_later_is_decoded(tiny_sentencepiece: Path) -> None:
    tokenizer = build_tokenizer("sentencepiece", path=tiny_sentencepiece, fix_command_token=False, special_tokens="glm")
    assert tokenizer.special.gmask == tokenizer.special.eop
    assert tokenizer.decode([tokenizer.special.eop]) == "[gMASK]"


def test_surrogate_pairs_are_joined_and_lone_ones_replaced() -> None:
    assert well_formed("a\ud83d\ude00b\ud800c") == "a😀b\ufffdc"
    assert well_formed("plain ½") == "plain ½"


_BUILT: dict[object, Tokenizer] = {}


def _cached(name: str, path: Path, **options: str) -> Tokenizer:
    key = (name, path, *options.items())
    if key not in _BUILT:
        _BUILT[key] = build_tokenizer(name, path=path, special_tokens="glm", **options)
    return _BUILT[key]


def _gpt2_tables(folder: Path, vocab: str, merges: str) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    key = (folder, vocab)
    if key not in _TABLES:
        pairs = [tuple(x.split(" ")) for x in (folder / merges).read_text(encoding="utf-8").split("\n")[1:-1]]
        ranks = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
        _TABLES[key] = (json.loads((folder / vocab).read_text(encoding="utf-8")), ranks)
    return _TABLES[key]


_TABLES: dict[object, tuple[dict[str, int], dict[tuple[str, str], int]]] = {}


def _later_with_text(tokenizer: Tokenizer, token: CommandToken) -> CommandToken:
    return [other for other in tokenizer.command_tokens if other.text == token.text][-1]


@pytest.mark.parametrize(
    ("name", "files", "spelling", "readable"),
    [
        ("gpt2_bpe", "tiny_gpt2", "Ġthe", " the"),
        ("gpt2_bpe", "tiny_gpt2", "Ċ", "\n"),
        ("gpt2_bpe", "tiny_gpt2", "ä½", "ä½"),  # two of three bytes
        ("bert_wordpiece", "tiny_bert", "##ing", "##ing"),
        ("bert_wordpiece", "tiny_bert", "中", "中"),
        ("sentencepiece", "tiny_sentencepiece", "▁", "▁"),
    ],
)
def test_a_token_is_readable(request, name, files, spelling, readable):
    tokenizer = build_tokenizer(name, path=request.getfixturevalue(files))
    (token,) = (id_ for id_ in range(tokenizer.vocab_size) if tokenizer.token_text(id_) == spelling)
    assert tokenizer.readable_token(token) == readable
