"""Finding, checking, saving and loading vocabularies; what is wrong with a file is said in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slow_tokenizers import BYTE_LETTERS

from ftk.errors import UserError
from ftk.registry import TOKENIZERS
from ftk.tokenizers import Tokenizer, build_tokenizer, load_tokenizer

PROMPT = "The sea, [MASK] she sells [gMASK] “shells” in 1807 年。"


def test_importing_the_room_imports_no_library() -> None:
    code = (
        "import sys, ftk.tokenizers; from ftk.registry import TOKENIZERS; TOKENIZERS.names();"
        "print([m for m in ('torch', 'tokenizers', 'sentencepiece', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_built_in_names_register_where_the_table_says() -> None:
    for name in ("bert_wordpiece", "gpt2_bpe", "sentencepiece"):
        assert TOKENIZERS.get(name).target.name == name


def test_saved_and_loaded_is_the_same_tokenizer(tiny: Tokenizer, tmp_path: Path) -> None:
    tiny.save(tmp_path / "data-bin" / "tokenizer")
    for folder in (tmp_path / "data-bin", tmp_path / "data-bin" / "tokenizer"):
        loaded = load_tokenizer(folder)
        assert loaded.fingerprint == tiny.fingerprint
        assert loaded.command_tokens == tiny.command_tokens
        assert loaded.encode(PROMPT, command_tokens=True) == tiny.encode(PROMPT, command_tokens=True)


def test_a_saved_folder_needs_nothing_else(tiny: Tokenizer, tmp_path: Path) -> None:
    tiny.save(tmp_path / "first")
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "first", moved)
    again = load_tokenizer(moved)
    again.save(tmp_path / "second")
    again.save(moved)  # onto itself
    for file in again.files:
        assert (tmp_path / "second" / file.path.name).read_bytes() == file.path.read_bytes()
    assert load_tokenizer(moved).fingerprint == load_tokenizer(tmp_path / "second").fingerprint
    assert not list(tmp_path.rglob("*.tmp*"))


def test_fingerprint_depends_on_options_and_content_only(tiny_gpt2: Path, tiny_roberta: Path, tmp_path: Path) -> None:
    first = build_tokenizer("gpt2_bpe", path=tiny_gpt2, special_tokens="glm")
    copied = tmp_path / "copied"
    shutil.copytree(tiny_gpt2, copied)
    assert (
        build_tokenizer("gpt2_bpe", path=copied / "merges.txt", special_tokens="glm").fingerprint == first.fingerprint
    )
    others = [
        build_tokenizer("gpt2_bpe", path=tiny_gpt2, task_mask=False, special_tokens="glm"),
        build_tokenizer("gpt2_bpe", path=tiny_gpt2, decoder_mask=True, special_tokens="glm"),
        build_tokenizer("gpt2_bpe", path=tiny_roberta, special_tokens="glm"),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize("damage", ["changed", "missing", "escaping", "not json", "other ids", "no tokenizer"])
def test_a_damaged_folder_is_refused(damage: str, tiny: Tokenizer, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    description = tmp_path / "ftk_tokenizer.json"
    values = json.loads(description.read_text(encoding="utf-8"))
    file = tmp_path / tiny.files[0].path.name
    if damage == "changed":
        file.write_bytes(file.read_bytes() + b"\n")
        expected = "is not the file that was saved"
    elif damage == "missing":
        file.unlink()
        expected = "no such file"
    elif damage == "escaping":
        values["files"][0]["name"] = "../" + file.name
        expected = "plain name"
    elif damage == "not json":
        expected = r"ftk_tokenizer\.json: is not JSON"
    elif damage == "other ids":
        values["command_tokens"]["pad"] = 12345
        expected = "other ids"
    else:
        description.unlink()
        expected = "holds no tokenizer"
    if damage in ("escaping", "other ids"):
        description.write_text(json.dumps(values), encoding="utf-8")
    elif damage == "not json":
        description.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=expected):
        load_tokenizer(tmp_path)


def test_saving_refuses_a_vocabulary_that_changed_meanwhile(tiny_bert: Path, tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    shutil.copy(tiny_bert, path)
    tokenizer = build_tokenizer("bert_wordpiece", path=path)
    path.write_text(path.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    with pytest.raises(UserError, match="changed on disk"):
        tokenizer.save(tmp_path / "saved")


def test_a_folder_with_one_vocabulary_or_either_file_is_enough(tiny_gpt2: Path, tiny_sentencepiece: Path) -> None:
    expected = build_tokenizer("gpt2_bpe", path=tiny_gpt2).encode(PROMPT)
    for path in (tiny_gpt2 / "vocab.json", str(tiny_gpt2 / "merges.txt")):
        assert build_tokenizer("gpt2_bpe", path=path).encode(PROMPT) == expected
    by_folder = build_tokenizer("sentencepiece", path=tiny_sentencepiece.parent)
    assert by_folder.fingerprint == build_tokenizer("sentencepiece", path=tiny_sentencepiece).fingerprint


@pytest.mark.parametrize("name", ["bert_wordpiece", "gpt2_bpe", "sentencepiece"])
def test_missing_empty_and_ambiguous_places_are_named(name: str, tmp_path: Path, tiny_gpt2: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        build_tokenizer(name, path=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no file \*"):
        build_tokenizer(name, path=tmp_path)
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(UserError, match=r"holds no file .*; give \S+tokenizer$"):
        build_tokenizer(name, path=tmp_path)
    for prefix in ("a", "b"):
        (tmp_path / f"{prefix}-vocab.txt").touch()
        (tmp_path / f"{prefix}.model").touch()
        shutil.copy(tiny_gpt2 / "vocab.json", tmp_path / f"{prefix}-vocab.json")
        shutil.copy(tiny_gpt2 / "merges.txt", tmp_path / f"{prefix}-merges.txt")
    with pytest.raises(UserError, match=r"holds 2 files .*\(a.*, b.*\); give one of them"):
        build_tokenizer(name, path=tmp_path)


def test_wrong_options_are_named(tiny_gpt2: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'gpt2_bpe'"):
        build_tokenizer("gpt2-bpe", path=tiny_gpt2)
    with pytest.raises(UserError, match="no option 'taskmask'; did you mean 'task_mask'"):
        build_tokenizer("gpt2_bpe", path=tiny_gpt2, taskmask=True, special_tokens="glm")
    with pytest.raises(UserError, match="tokenizer.path is missing"):
        build_tokenizer("gpt2_bpe")
    with pytest.raises(UserError, match="must be one of auto, glm, generic, gpt2, roberta"):
        build_tokenizer("gpt2_bpe", path=tiny_gpt2, layout="bert", special_tokens="glm")
    with pytest.raises(UserError, match="must be true or false"):
        build_tokenizer("gpt2_bpe", path=tiny_gpt2, task_mask="perhaps", special_tokens="glm")
    with pytest.raises(UserError, match="sentinel_tokens is -1"):
        build_tokenizer("bert_wordpiece", path=tiny_gpt2, sentinel_tokens=-1, special_tokens="glm")


SPECIAL = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (SPECIAL.encode() + b"the\nthe\n", r"vocab\.txt:7: 'the' is already in line 6"),
        (SPECIAL.encode() + b"\n##s\n", r"vocab\.txt:6: the line is empty"),
        (SPECIAL.encode() + b" a\n", r"vocab\.txt:6: ' a' begins or ends with white space"),
        (SPECIAL.encode() + b"\xff\n", r"vocab\.txt:6: byte 31 is not UTF-8"),
        (b"[PAD]\nthe\n", r"holds no \[UNK\]"),
    ],
)
def test_bad_wordpiece_vocabularies(content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(UserError, match=expected):
        build_tokenizer("bert_wordpiece", path=tmp_path)


def test_a_vocabulary_with_windows_line_ends_is_the_same(tiny_bert: Path, tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(tiny_bert.read_bytes().replace(b"\n", b"\r\n"))
    text = "the unable starting text"
    assert build_tokenizer("bert_wordpiece", path=path).encode(text) == build_tokenizer(
        "bert_wordpiece", path=tiny_bert
    ).encode(text)


def test_casing_is_told_by_capitals_in_the_vocabulary(tiny_bert: Path, tmp_path: Path) -> None:
    cased = tmp_path / "vocab.txt"
    cased.write_bytes(tiny_bert.read_bytes() + b"The\n")
    assert build_tokenizer("bert_wordpiece", path=tiny_bert).decode([5]) == "a"
    tokenizer = build_tokenizer("bert_wordpiece", path=cased)
    assert tokenizer.decode(tokenizer.encode("The the")) == "The the"
    lowered = build_tokenizer("bert_wordpiece", path=cased, casing="uncased")
    assert lowered.decode(lowered.encode("The the")) == "the the"


LETTERS = {letter: id_ for id_, letter in enumerate([*BYTE_LETTERS.values(), "<|endoftext|>"])}


@pytest.mark.parametrize(
    ("vocab", "merges", "expected"),
    [
        ('{"a": 0, "b": 0, "c": "2", "d": -1, "e": 99', "", r"vocab\.json:1: not JSON"),
        ("[1]", "", "must be an object"),
        ("{}", "", "must be an object"),
        ('{"a": 0, "a": 1}', "", "token 'a' is in it twice"),
        ('{"a": 0, "b": "2"}', "", "token 'b' has the id '2'"),
        ('{"a": 0, "b": true}', "", "token 'b' has the id True"),
        ('{"a": 0, "b": -1}', "", "token 'b' has the id -1"),
        ('{"a": 0, "b": 0}', "", "tokens 'a' and 'b' have the same id 0"),
        ('{"a": 0, "b": 99}', "", "2 tokens, but ids up to 99"),
        ('{"a": 0, "\\ud800": 1}', "", "lone surrogate"),
        ('{"a": 0, "b": 1}', "", "no token for 254 of the 256 bytes"),
        (json.dumps(LETTERS), "#version: 0.2\na b\n", r"merges\.txt:2: 'ab' is not in the vocabulary"),
        (json.dumps(LETTERS), "#version: 0.2\nabc\n", r"merges\.txt:2: 'abc' is not two parts"),
        (json.dumps(LETTERS | {"ab": 257}), "a b\na b\n", r"merges\.txt:2: the same merge is in line 1"),
    ],
)
def test_bad_byte_level_vocabularies(vocab: str, merges: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(vocab, encoding="utf-8")
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    with pytest.raises(UserError, match=expected):
        build_tokenizer("gpt2_bpe", path=tmp_path)


def test_a_vocabulary_without_the_tokens_of_a_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(dict(list(LETTERS.items())[:-1])), encoding="utf-8")
    (tmp_path / "merges.txt").touch()
    with pytest.raises(UserError, match=r"vocab\.json: holds no <\|endoftext\|>"):
        build_tokenizer("gpt2_bpe", path=tmp_path, special_tokens="glm")


def test_a_vocabulary_without_its_merges_is_refused(tiny_gpt2: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_gpt2 / "vocab.json", tmp_path / "vocab.json")
    with pytest.raises(UserError, match=r"holds vocab\.json but not its merges merges\.txt"):
        build_tokenizer("gpt2_bpe", path=tmp_path)
    with pytest.raises(UserError, match=r"its other half .*merges\.txt is missing"):
        build_tokenizer("gpt2_bpe", path=tmp_path / "vocab.json")
    (tmp_path / "other.json").touch()
    with pytest.raises(UserError, match="ends in neither"):
        build_tokenizer("gpt2_bpe", path=tmp_path / "other.json")


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "flipped"])
def test_what_is_not_a_sentencepiece_model_is_refused(damage: str, tiny_sentencepiece: Path, tmp_path: Path) -> None:
    whole = tiny_sentencepiece.read_bytes()
    broken = {
        "empty": b"",
        "text": b"these are words\n" * 20,
        "cut": whole[: len(whole) // 2],
        "flipped": whole.replace("▁".encode(), b"\xe2\x96\xff"),
    }[damage]
    assert broken != whole
    (tmp_path / "x.model").write_bytes(broken)
    with pytest.raises(UserError, match=r"x\.model: (not a SentencePiece model|is a SentencePiece model without)"):
        build_tokenizer("sentencepiece", path=tmp_path)


def test_hostile_vocabularies_are_refused(hostile: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"80_vocab_duplicates\.txt:7: 'the' is already in line 6"):
        build_tokenizer("bert_wordpiece", path=hostile / "80_vocab_duplicates.txt")
    shutil.copy(hostile / "82_vocab_bad.json", tmp_path / "vocab.json")
    (tmp_path / "merges.txt").touch()
    with pytest.raises(UserError, match="not JSON"):
        build_tokenizer("gpt2_bpe", path=tmp_path)
    for file in sorted(hostile.iterdir()):
        for name in ("bert_wordpiece", "gpt2_bpe", "sentencepiece"):
            with pytest.raises(UserError):
                build_tokenizer(name, path=file)


def test_gpt2_and_roberta_are_told_apart(tiny_gpt2: Path, tiny_roberta: Path) -> None:
    assert (
        build_tokenizer("gpt2_bpe", path=tiny_gpt2, special_tokens="glm").special.sep
        != build_tokenizer("gpt2_bpe", path=tiny_gpt2, special_tokens="glm").special.pad
    )
    roberta = build_tokenizer("gpt2_bpe", path=tiny_roberta, special_tokens="glm")
    assert (roberta.special.pad, roberta.special.sep, roberta.special.cls, roberta.special.unk) == (2, 2, 0, 3)
    assert roberta.special.mask == roberta.num_text_tokens - 1
    forced = build_tokenizer("gpt2_bpe", path=tiny_roberta, layout="gpt2", special_tokens="glm")
    assert forced.token_text(forced.special.pad) == "<|endoftext|>"
    assert forced.special.mask >= forced.num_text_tokens


@pytest.mark.parametrize(
    "content",
    [
        "[" * 5000,
        '{"format": 1, "name": "x", "options": {}, "files": ' + "[" * 500 + "]" * 500 + "}",
        '{"format": ' + "9" * 5000 + "}",
        '{"format": NaN, "name": "x", "options": {}, "files": []}',
        '{"format": 1, "name": "x", "options": {}, "files": [{"name": "a\\u0000b"}]}',
        '{"format": 1, "name": "bert_wordpiece", "options": {"sentinel_tokens": 1000000000}, "files": []}',
        '{"format": 1, "name": "bert_wordpiece", "options": {"sentinel_tokens": 1e999}, "files": []}',
        '{"format": 1, "name": "bert_wordpiece", "options": {"casing": [[]]}, "files": []}',
        '{"format": 1, "name": "\\ud800", "options": {}, "files": []}',
        '{"format": 1, "name": "bert_wordpiece", "options": {"\\ud800": 1}, "files": []}',
        '{"format": true, "name": "", "options": {}, "files": [[]]}',
        "\ufeff",
    ],
)
def test_description_made_to_deceive_is_refused_in_plain_words(tmp_path: Path, content: str) -> None:
    (tmp_path / "ftk_tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_files_that_are_no_regular_ones_are_refused_without_waiting(tiny: Tokenizer, tmp_path: Path, kind: str) -> None:
    tiny.save(tmp_path)
    for path in (tmp_path / tiny.files[0].path.name, tmp_path / "ftk_tokenizer.json"):
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        with pytest.raises(UserError, match=r"not a regular file|holds no tokenizer"):
            load_tokenizer(tmp_path)
        with pytest.raises(UserError, match=r"not a regular file|; give "):
            build_tokenizer(tiny.name, path=path)


def test_saving_follows_no_link_that_waits_for_it(tiny: Tokenizer, tmp_path: Path) -> None:
    precious = tmp_path / "thesis.txt"
    precious.write_text("years of work")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("ftk_tokenizer.json", tiny.files[0].path.name):
        (out / name).symlink_to(precious)
        (out / f"{name}.tmp").symlink_to(precious)
    tiny.save(out)
    assert precious.read_text() == "years of work"
    assert load_tokenizer(out).fingerprint == tiny.fingerprint
