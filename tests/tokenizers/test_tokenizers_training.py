"""Training a SentencePiece model: repeatable, lossless by bytes, clear about what is wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece
from slow_tokenizers import SENTENCES

from ftk.errors import UserError
from ftk.tokenizers import build_tokenizer, train_sentencepiece


@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char", "word"])
def test_the_same_text_gives_the_same_model(model_type: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(SENTENCES * 5), encoding="utf-8")
    size = {"char": 300, "word": 280}.get(model_type, 320)
    models = [
        train_sentencepiece(source, tmp_path / name, vocab_size=size, model_type=model_type).read_bytes()
        for name, source in (
            ("1", text),
            ("2", str(text)),
            ("3", [text]),
            ("4", SENTENCES * 5),
            ("5", iter(SENTENCES * 5)),
        )
    ]
    assert len(set(models)) == 1


def test_a_sample_of_the_lines_is_always_the_same(tmp_path: Path) -> None:
    words = random.Random(5)
    lines = [" ".join("".join(words.choices("abcdefgh", k=4)) for _ in range(6)) for _ in range(1000)]
    models = [
        train_sentencepiece(lines, tmp_path, vocab_size=300, max_lines=max_lines).read_bytes()
        for max_lines in (101, 101, 0)
    ]
    assert models[0] == models[1]
    assert models[0] != models[2]


def test_nothing_is_lost_to_unk_with_byte_fallback(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("sentencepiece", path=train_sentencepiece(SENTENCES * 3, tmp_path, vocab_size=320))
    text = "naïve 😀 العربية ½ ﬁ ，\tone\nline\0"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_without_byte_fallback_rare_characters_become_unk(tmp_path: Path) -> None:
    path = train_sentencepiece(SENTENCES * 3, tmp_path, vocab_size=66, byte_fallback=False)
    tokenizer = build_tokenizer("sentencepiece", path=path)
    assert 0 in tokenizer.encode("the 😀")


def test_command_tokens_stand_behind_any_number_of_pieces(tmp_path: Path) -> None:
    path = train_sentencepiece(SENTENCES, tmp_path, vocab_size=310)
    tokenizer = build_tokenizer("sentencepiece", path=path, special_tokens="glm")
    assert tokenizer.num_text_tokens == 310
    assert (tokenizer.special.pad, tokenizer.special.mask, tokenizer.special.gmask) == (310, 313, 319)
    assert tokenizer.vocab_size == 320


def test_the_model_has_no_control_pieces_of_its_own(tiny_sentencepiece: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tiny_sentencepiece))
    assert not any(processor.is_control(i) for i in range(processor.get_piece_size()))


def test_lines_longer_than_the_trainer_takes_are_cut_not_skipped(tmp_path: Path) -> None:
    word = "abracadabra"
    tokenizer = build_tokenizer(
        "sentencepiece",
        path=train_sentencepiece([f"{word} " * 20000, "中文" * 20000], tmp_path, vocab_size=266),
    )
    pieces = [tokenizer.token_text(i) for i in tokenizer.encode(f"{word} 中文")]
    assert not any(piece.startswith("<0x") for piece in pieces)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"vocab_size": 100_000}, r"`vocab_size` 100000 is too large for this text \(4 lines\); it allows at most \d+"),
        ({"vocab_size": 100_000, "model_type": "bpe"}, "is too large for this text .* it allows at most"),
        ({"vocab_size": 100_000, "model_type": "word"}, "is too large for this text"),
        ({"vocab_size": 100}, r"`vocab_size` 100 is too small for the characters of this text; give at least \d+"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
        ({"model_type": "lstm"}, "model_type is 'lstm'; it must be one of unigram, bpe, char, word"),
        ({"character_coverage": 1.5}, "character_coverage is 1.5"),
        ({"max_lines": -1}, "max_lines is -1"),
        ({"max_lines": 100}, r"max_lines is 100; it must be 0 \(all\) or at least 101"),
        ({"vocab_size": 300, "normalization": "nonsense"}, "nonsense"),
    ],
)
def test_what_cannot_be_trained_is_said(options: dict[str, object], expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=expected):
        train_sentencepiece(SENTENCES, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_the_size_that_is_said_to_be_allowed_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        train_sentencepiece(SENTENCES, tmp_path, vocab_size=100_000)
    allowed = int(str(error.value).rsplit(" ", 1)[1])
    assert train_sentencepiece(SENTENCES, tmp_path, vocab_size=allowed).is_file()


def test_files_that_are_not_text_are_named(tmp_path: Path) -> None:
    packed = tmp_path / "text.txt"
    packed.write_bytes(b"\x1f\x8b\x08\x00rest")
    for source, expected in (
        (tmp_path / "nowhere.txt", r"nowhere\.txt: no such file"),
        (tmp_path, "is a directory"),
        (packed, "is compressed"),
        ([SENTENCES[0], packed], "is compressed"),
        ([], "there is no text"),
        (["", " \n\t", "\0"], "there is no text"),
        ([str(packed)], "give pathlib.Path objects"),
    ):
        with pytest.raises(UserError, match=expected):
            train_sentencepiece(source, tmp_path / "out", vocab_size=300)


def test_an_error_in_the_callers_lines_reaches_the_caller(tmp_path: Path) -> None:
    def lines() -> Iterator[str]:
        yield from SENTENCES
        raise ZeroDivisionError("in the middle")

    with pytest.raises(ZeroDivisionError):
        train_sentencepiece(lines(), tmp_path, vocab_size=300)
    assert not list(tmp_path.iterdir())


def test_bad_bytes_are_counted_not_fatal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("\n".join(SENTENCES).encode() + b"\nbad \xff byte\n\xed\xa0\x80\n")
    train_sentencepiece(path, tmp_path / "out", vocab_size=310)
    assert "2 lines were not UTF-8" in caplog.text
