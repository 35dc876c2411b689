"""fairseq's dict.txt: ids as fairseq gives them, and GLM's command tokens behind them."""

from __future__ import annotations

import pytest

from ftk.errors import UserError
from ftk.tokenizers import build_tokenizer, load_tokenizer


def make(tmp_path, text: str, **options):
    (tmp_path / "dict.txt").write_text(text, encoding="utf-8")
    return build_tokenizer("fairseq_dict", path=tmp_path / "dict.txt", special_tokens="glm", **options)


def test_ids_follow_the_lines_behind_four_special_symbols(tmp_path):
    tokenizer = make(tmp_path, "the 10\ncat 5\nmadeupword0000 0\n")
    assert tokenizer.encode("the cat\tsat  the") == [4, 5, 3, 4]
    assert tokenizer.encode_batch(["cat", " ", "dog cat"]) == [[5], [], [3, 5]]
    assert tokenizer.decode([0, 4, 5, 3, 6, 2]) == "<s> the cat <unk> madeupword0000 </s>"
    special = tokenizer.special
    assert (special.cls, special.pad, special.eos, special.sep, special.unk) == (0, 1, 2, 2, 3)
    assert (special.mask, special.sop, special.eop, special.gmask, special.smask) == (7, 8, 9, 10, 11)
    assert tokenizer.vocab_size == 12


def test_a_mask_in_the_dictionary_is_the_mask(tmp_path):
    tokenizer = make(tmp_path, "the 10\n<mask> 1\ncat 5\n")
    assert tokenizer.special.mask == 5
    assert tokenizer.special.sop == 7
    assert tokenizer.encode("the <mask> </s>") == [4, 3, 3]  # a corpus cannot smuggle command tokens in
    assert tokenizer.encode("the <mask> </s>", command_tokens=True) == [4, 5, 2]


def test_an_overwritten_symbol_has_its_last_id_and_the_older_id_keeps_its_place(tmp_path):
    tokenizer = make(tmp_path, "the 10\ncat 5\nthe 3 #fairseq:overwrite\n<unk> 1 #fairseq:overwrite\n")
    assert tokenizer.encode("the cat") == [6, 5]
    assert tokenizer.decode([4, 5, 6]) == "the cat the"
    assert tokenizer.special.unk == 3  # as in fairseq, whose special ids are fixed
    assert tokenizer.encode("dog") == [3]


def test_a_symbol_may_be_a_space_or_hold_one(tmp_path):
    tokenizer = make(tmp_path, "  10\na b 3\nc 2\n")
    assert tokenizer.token_text(4) == " "
    assert tokenizer.token_text(5) == "a b"
    assert tokenizer.encode("c") == [6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the 10\ncat\n", r"dict.txt:2: 'cat' is not a symbol, a space and its count"),
        ("the ten\n", "dict.txt:1: 'the ten' is not"),
        ("\n", "dict.txt:1: '' is not"),
        ("10\n", "dict.txt:1: '10' is not"),
        ("the 10\nthe 9\n", r"dict.txt:2: 'the' is already in it \(id 4\)"),
        ("<pad> 1\n", r"dict.txt:1: '<pad>' is already in it \(id 1\)"),
        ("#fairseq:overwrite\n", "dict.txt:1"),
    ],
)
def test_a_damaged_dictionary_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        make(tmp_path, text)


def test_pieces_become_words(tmp_path):
    text = "lo@@ 3\nwer 2\n\u2581new 2\nest 1\n\u2581the 1\n"
    assert make(tmp_path, text, remove_bpe="subword_nmt").decode([4, 5, 4]) == "lower lo"  # as fairseq does
    assert make(tmp_path, text, remove_bpe="sentencepiece").decode([6, 7, 8]) == "newest the"


def test_a_folder_stands_for_its_dictionary(tmp_path):
    (tmp_path / "dict.en.txt").write_text("a 1\n")
    assert build_tokenizer("fairseq_dict", path=tmp_path).encode("a") == [4]
    (tmp_path / "dict.de.txt").write_text("b 1\n")
    with pytest.raises(UserError, match=r"holds 2 files dict.\*.txt \(dict.de.txt, dict.en.txt\)"):
        build_tokenizer("fairseq_dict", path=tmp_path)
    (tmp_path / "dict.txt").write_text("c 1\n")
    assert build_tokenizer("fairseq_dict", path=tmp_path).encode("c") == [4]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no file dict.\*.txt"):
        build_tokenizer("fairseq_dict", path=tmp_path / "empty")


def test_it_is_saved_and_loaded(tmp_path):
    tokenizer = make(tmp_path, "the 10\ncat 5\n", remove_bpe="sentencepiece", decoder_mask=True)
    tokenizer.save(tmp_path / "kept")
    again = load_tokenizer(tmp_path / "kept")
    assert again.fingerprint == tokenizer.fingerprint
    assert again.special == tokenizer.special
