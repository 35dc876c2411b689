"""What ftk-preprocess does to documents: repeats, limits, normal forms, held-out splits, end tokens."""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections import Counter
from pathlib import Path

import preprocessing
import pytest
from preprocessing import sentences, tree

from ftk.data import IndexedDataset
from ftk.data.inspect_data import verify
from ftk.data.text.blocks import MAX_DOCUMENT_BYTES
from ftk.data.text.files import cut_file
from ftk.tokenizers import load_tokenizer
from ftk.tokenizers.token_bytes import byte_letters


def lines_of(count: int, seed: int) -> list[str]:
    """Some of them more than once."""
    return sentences(count, seed, (1, 6), "")


def run(out: Path, model: Path | None, *arguments: object) -> int:
    path = ["--tokenizer-path", model] if model else []
    return preprocessing.run("--destdir", out, "--workers", 1, *path, *arguments)


def documents(out: Path, split: str = "train") -> list[list[int]]:
    return [row.tolist() for row in IndexedDataset(out / split)]


def split_record(out: Path, split: str = "train") -> dict:
    return json.loads((out / "preprocess.json").read_text(encoding="utf-8"))["splits"][split]


@pytest.fixture
def corpus(tmp_path) -> str:
    """Three files of a split, one of them compressed in two members; lines repeat within and between them."""
    lines = lines_of(1500, 1)
    (tmp_path / "a.txt").write_text("".join(f"{line}\n" for line in lines[:700]) + "\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines[700:1100]), "utf-8")
    halves = ["".join(f"{line}\n" for line in part).encode() for part in (lines[1100:1300], lines[1300:])]
    (tmp_path / "c.txt.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    return ",".join(str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.txt.gz"))


def test_dedup_keeps_the_first_of_equal_documents_in_all_files_of_a_split(tmp_path, corpus, model):
    (tmp_path / "valid.txt").write_text("\n".join(lines_of(1500, 1)[:50]))
    out = tmp_path / "out"
    assert run(out, model, "--trainpref", corpus, "--validpref", tmp_path / "valid.txt", "--dedup") == 0
    tokenizer = load_tokenizer(out)
    lines = lines_of(1500, 1)
    assert documents(out) == [tokenizer.encode(line) for line in dict.fromkeys(lines)]
    assert split_record(out)["skipped"] == {"duplicate": 1500 - len(set(lines)), "empty": 1}
    assert documents(out, "valid") == [tokenizer.encode(line) for line in dict.fromkeys(lines[:50])]
    assert verify(out) == []


def test_documents_too_short_and_too_long_are_left_out_and_counted(tmp_path, corpus, model):
    out = tmp_path / "out"
    limits = ["--min-tokens", 4, "--max-tokens-per-document", 9]
    assert run(out, model, "--trainpref", corpus, *limits) == 0
    tokenizer = load_tokenizer(out)
    rows = [tokenizer.encode(line) for line in lines_of(1500, 1)]
    assert documents(out) == [row for row in rows if 4 <= len(row) <= 9]
    skipped = {"too_short": sum(len(row) < 4 for row in rows), "too_long": sum(len(row) > 9 for row in rows)}
    assert min(skipped.values()) > 10
    assert split_record(out)["skipped"] == skipped | {"empty": 1}
    settings = json.loads((out / "preprocess.json").read_text())["settings"]
    assert (settings["min_tokens"], settings["max_tokens_per_document"], settings["dedup"]) == (4, 9, False)


def test_append_eos_puts_the_end_token_behind_each_document_and_the_limits_do_not_count_it(tmp_path, corpus, model):
    out = tmp_path / "out"
    arguments = ["--trainpref", corpus, "--append-eos", "--special-tokens", "with_end"]
    assert run(out, model, *arguments, "--min-tokens", 4) == 0
    tokenizer = load_tokenizer(out)
    rows = [tokenizer.encode(line) for line in lines_of(1500, 1)]
    assert documents(out) == [[*row, tokenizer.special.eos] for row in rows if len(row) >= 4]
    assert verify(out) == []


TEXTS = ["Å ﬁne ½", unicodedata.normalize("NFD", "Å ﬁne ½"), "ＡＢＣ　１２", "plain", "한글", "　"]


@pytest.mark.parametrize("form", ["none", "nfc", "nfkc"])
def test_normalize_comes_before_all_else(tmp_path, form):
    """GPT-2's tokenizer keeps every byte, so that what it decodes to is what it was given."""
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    vocabulary = tmp_path / "gpt2"
    vocabulary.mkdir()
    spellings = [*byte_letters().values(), "<|endoftext|>"]
    (vocabulary / "vocab.json").write_text(json.dumps({spelling: i for i, spelling in enumerate(spellings)}))
    (vocabulary / "merges.txt").write_text("#version: 0.2\n")
    out = tmp_path / "out"
    arguments = ["--trainpref", source, "--tokenizer", "gpt2_bpe", "--normalize", form, "--dedup"]
    assert run(out, vocabulary, *arguments) == 0
    expected = [text if form == "none" else unicodedata.normalize(form.upper(), text) for text in TEXTS]
    expected = [text for text in dict.fromkeys(expected) if text.strip()]
    assert [load_tokenizer(out).decode(row) for row in documents(out)] == expected
    assert len(expected) == {"none": 5, "nfc": 4, "nfkc": 4}[form]
    settings = json.loads((out / "preprocess.json").read_text())["settings"]
    assert settings.get("unicode_version") == (None if form == "none" else unicodedata.unidata_version)


def test_held_out_splits_depend_on_the_text_alone(tmp_path, corpus, model):
    def splits(out: Path) -> dict[str, Counter]:
        return {name: Counter(map(tuple, documents(out, name))) for name in ("train", "valid", "test")}

    ratios = ["--valid-ratio", 0.1, "--test-ratio", 0.2]
    assert run(tmp_path / "one", model, "--trainpref", corpus, *ratios) == 0
    one = splits(tmp_path / "one")
    tokenizer = load_tokenizer(tmp_path / "one")
    assert sum(one.values(), Counter()) == Counter(tuple(tokenizer.encode(line)) for line in lines_of(1500, 1))
    distinct = {name: set(counts) for name, counts in one.items()}
    assert not distinct["train"] & distinct["valid"]
    assert not distinct["train"] & distinct["test"]
    assert not distinct["valid"] & distinct["test"]
    total = sum(map(len, distinct.values()))
    assert abs(len(distinct["valid"]) / total - 0.1) < 0.04
    assert abs(len(distinct["test"]) / total - 0.2) < 0.05

    backwards = ",".join(reversed(corpus.split(",")))
    assert run(tmp_path / "two", model, "--trainpref", backwards, *ratios) == 0
    assert splits(tmp_path / "two") == one
    assert run(tmp_path / "three", model, "--trainpref", corpus, "--test-ratio", 0.2) == 0
    assert documents(tmp_path / "three", "test") == documents(tmp_path / "one", "test")
    assert split_record(tmp_path / "one", "valid")["held_out_of"] == "train"
    assert verify(tmp_path / "one") == []


def test_a_model_is_trained_on_what_will_be_the_split_train(tmp_path):
    """Held-out letters are unknown to it, repeats are seen once, and text is normalized first."""
    from ftk.data.text.preprocess import _training_texts
    from ftk.data.text.preprocess_config import DocumentConfig, InputConfig

    lines = [f"{line} Å" for line in lines_of(300, 2)]
    (tmp_path / "a.txt").write_text("\n".join(unicodedata.normalize("NFD", line) for line in lines))
    inputs = InputConfig(trainpref=str(tmp_path / "a.txt"), valid_ratio=0.2)
    options = DocumentConfig(dedup=True, normalize="nfc")
    texts = list(_training_texts(inputs, options, [(str(tmp_path / "a.txt"),)]))
    out = tmp_path / "out"
    arguments = ["--trainpref", tmp_path / "a.txt", "--valid-ratio", 0.2, "--dedup", "--normalize", "nfc"]
    assert run(out, None, *arguments, "--vocab-size", 290) == 0
    tokenizer = load_tokenizer(out)
    assert documents(out) == [tokenizer.encode(text) for text in texts]
    assert len(texts) < len(set(lines))


@pytest.mark.parametrize("separator", ["line", "blank-line", "file"])
def test_everything_together_is_the_same_whatever_the_workers(tmp_path, corpus, model, monkeypatch, separator):
    monkeypatch.setattr("ftk.data.text.preprocess.cut_file", lambda *args, **rest: cut_file(*args, 500, **rest))
    monkeypatch.setattr("ftk.data.text.files.read_blocks.__defaults__", (500, MAX_DOCUMENT_BYTES))
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"".join(b"bad \xff\n" if i % 40 == 20 else b"good %d\n" % (i % 70) for i in range(400)))
    small = []
    for i in range(30):
        small.append(tmp_path / f"small{i}.txt")
        small[-1].write_text(f"the cat\nsaw {i % 7} trees\n\nand a bird\n")
    files = ",".join([corpus, str(bad), *map(str, small), str(bad)])
    arguments = ["--trainpref", files, "--validpref", small[3], "--on-error", "skip", "--document-separator", separator]
    arguments += ["--dedup", "--test-ratio", "0.2", "--min-tokens", "6", "--max-tokens-per-document", "500"]
    arguments += ["--append-eos", "--special-tokens", "with_end", "--normalize", "nfkc"]
    for workers in (1, 2, 3):
        assert run(tmp_path / f"out-{workers}", model, *arguments, "--workers", workers) == 0
    assert tree(tmp_path / "out-1") == tree(tmp_path / "out-2") == tree(tmp_path / "out-3")
    record = split_record(tmp_path / "out-1")
    assert record["skipped"]["invalid_utf8"] == len(record["problems"])
    if separator == "line":
        lines = [20 + 40 * i + 1 for i in range(10)]
        assert [p["line"] for p in record["problems"]] == lines + lines
        raw = bad.read_bytes()
        assert all(
            raw[p["offset"]] == 0xFF and p["line"] == raw[: p["offset"]].count(b"\n") + 1 for p in record["problems"]
        )
        assert {"duplicate", "too_short"} <= set(record["skipped"])
    assert verify(tmp_path / "out-1") == []


def test_one_line_of_two_megabytes_is_no_problem(tmp_path, model):
    line = "the cat sat on a mat " * 100_000
    (tmp_path / "a.txt").write_text(f"one bird\n{line}\ntwo trees\n")
    out = tmp_path / "out"
    assert run(out, model, "--trainpref", tmp_path / "a.txt") == 0
    tokenizer = load_tokenizer(out)
    assert documents(out) == [tokenizer.encode(text) for text in ("one bird", line, "two trees")]


def test_a_text_key_needs_one_file_that_has_fields(tmp_path, model):
    lines, texts = tmp_path / "lines.jsonl", tmp_path / "texts.txt"
    for path in (lines, texts):
        path.write_text('{"body": "the cat sat"}\n')
    assert run(tmp_path / "out", model, "--trainpref", f"{lines},{texts}", "--text-key", "body") == 0
    assert run(tmp_path / "out2", model, "--trainpref", texts, "--format", "jsonl", "--text-key", "body") == 0
