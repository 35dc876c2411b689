"""ftk-preprocess from text to folder: what is written, and what is refused."""

from __future__ import annotations

import gzip
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from preprocessing import run, sentences, tree

from ftk.data import IndexedDataset
from ftk.data.inspect_data import verify
from ftk.data.text.encoding import EncoderPool, EncodingSettings
from ftk.data.text.files import cut_file
from ftk.data.text.preprocess_report import first_model
from ftk.tokenizers import SpecialTokens, build_tokenizer, load_tokenizer
from tests.processes import run_command


def test_the_folder_holds_the_encoded_documents_and_explains_itself(tmp_path, corpus, model, capsys):
    valid = tmp_path / "valid.jsonl.gz"
    valid.write_bytes(gzip.compress(b'{"body": "the cat ."}\n\n{"body": "[MASK] on a mat ."}\n'))
    out = tmp_path / "data-bin"
    arguments = ["--trainpref", corpus, "--validpref", valid, "--text-key", "body", "--workers", 2]
    assert run(*arguments, "--destdir", out, "--tokenizer", "sentencepiece", "--tokenizer-path", model) == 0

    tokenizer = load_tokenizer(out)
    assert tokenizer.fingerprint == build_tokenizer("sentencepiece", path=model).fingerprint
    lines = corpus.read_text(encoding="utf-8").splitlines()
    train = IndexedDataset(out / "train")
    assert [row.tolist() for row in train] == [tokenizer.encode(line) for line in lines]
    masked = IndexedDataset(out / "valid")[1]
    assert tokenizer.special.mask not in masked
    assert tokenizer.decode(masked) == "[MASK] on a mat ."

    record = json.loads((out / "preprocess.json").read_text(encoding="utf-8"))
    assert record["splits"]["train"]["documents"] == 3000
    assert record["splits"]["train"]["tokens"] == train.num_tokens
    assert record["splits"]["train"]["bytes"] == corpus.stat().st_size
    assert record["splits"]["valid"]["skipped"] == {"empty": 1}
    assert record["tokenizer"] == {
        "name": "sentencepiece",
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
    }
    assert set(record["files"]) == set(tree(out)) - {"preprocess.json"}
    assert verify(out) == []

    shown = capsys.readouterr()
    assert "train      3,000" in shown.out
    assert "valid: skipped 1 empty" in shown.out
    assert f"ftk-train {out}" in shown.out


def test_workers_started_anew_encode_the_same(tmp_path, corpus, model, monkeypatch):
    """Where there is no fork, workers are spawned and get everything by message."""
    build_tokenizer("sentencepiece", path=model).save(tmp_path / "tokenizer")
    settings = EncodingSettings(tmp_path / "tokenizer", np.dtype("<u2"))

    def tokens() -> list[int]:
        with EncoderPool(2, settings) as pool:
            blocks = pool.encode([part] for part in cut_file(str(corpus), "line", 20_000))
            return np.concatenate([block.tokens for block in blocks]).tolist()

    forked = tokens()
    monkeypatch.setattr("ftk.child_process.sys.platform", "elsewhere")
    assert tokens() == forked


def test_a_model_is_trained_where_no_vocabulary_is_given(tmp_path, corpus):
    out = tmp_path / "data-bin"
    assert run("--trainpref", corpus, "--destdir", out, "--vocab-size", 285, "--workers", 1) == 0
    assert load_tokenizer(out).num_text_tokens == 285
    assert verify(out) == []


def test_a_plugins_tokenizer_encodes_in_the_workers(tmp_path, corpus, model):
    plugin = tmp_path / "backwards_plugin.py"
    plugin.write_text(
        textwrap.dedent(
            """
            from ftk.registry import register_tokenizer
            from ftk.tokenizers.base import TokenizerConfig
            from ftk.tokenizers.sentencepiece import SentencePieceTokenizer

            @register_tokenizer("backwards", config=TokenizerConfig)
            class Backwards(SentencePieceTokenizer):
                name = "backwards"

                def _encode_texts(self, texts):
                    return [ids[::-1] for ids in super()._encode_texts(texts)]
            """
        )
    )
    arguments = ["--trainpref", corpus, "--destdir", tmp_path / "out", "--tokenizer-path", model, "--workers", 2]
    for name in (["--tokenizer", "backwards"], ["--tokenizer=backwards", "--overwrite"]):
        done = run_command("ftk-preprocess", *arguments, *name, "--user-dir", plugin, code=0)
        assert done.stdout.endswith(f" --save-dir run --user-dir {plugin}\n")
    run_command("ftk-data", "verify", tmp_path / "out", "--user-dir", plugin, code=0)
    plain = build_tokenizer("sentencepiece", path=model)
    line = corpus.read_text(encoding="utf-8").split("\n")[0]
    assert IndexedDataset(tmp_path / "out" / "train")[0].tolist() == plain.encode(line)[::-1]


@pytest.mark.parametrize(
    ("special", "arch"), [({"mask": 1, "pad": 2, "bos": 0}, "bert_tiny"), ({"mask": 1, "eos": 0}, "gpt2_tiny")]
)
def test_a_masked_language_model_is_proposed_where_the_tokenizer_has_its_tokens(special, arch):
    tokenizer: Any = SimpleNamespace(
        config=SimpleNamespace(path=None), source=None, special_tokens=None, special=SpecialTokens(**special)
    )
    assert first_model(tokenizer, has_pairs=False) == f"--arch {arch}"


@pytest.mark.parametrize("name", ["line", "blank-line", "file"])
def test_document_separators(tmp_path, model, name):
    path = tmp_path / "a.txt"
    path.write_text("the cat .\na mat .\n\nold house .\n", encoding="utf-8")
    arguments = ["--trainpref", path, "--destdir", tmp_path / "out", "--tokenizer-path", model, "--workers", 1]
    assert run(*arguments, "--document-separator", name) == 0
    assert len(IndexedDataset(tmp_path / "out" / "train")) == {"line": 3, "blank-line": 2, "file": 1}[name]


def test_several_files_follow_each_other(tmp_path, model):
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "old house ."}\n' if name == "b.jsonl" else "the cat .", "utf-8")
    files = f"{tmp_path / 'b.jsonl'},{tmp_path / 'a.txt'}"
    assert run("--testpref", files, "--destdir", tmp_path / "out", "--tokenizer-path", model, "--workers", 1) == 0
    tokenizer = load_tokenizer(tmp_path / "out")
    dataset = IndexedDataset(tmp_path / "out" / "test")
    assert [tokenizer.decode(row) for row in dataset] == ["old house .", "the cat ."]


def test_the_first_bad_document_stops_the_run(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setattr("ftk.data.text.preprocess.cut_file", lambda *args, **rest: cut_file(*args, 50, **rest))
    path = tmp_path / "bad.txt"
    path.write_bytes(b"a good line of the cat\n" * 20 + b"bad \xff\n" + b"good\n" * 9 + b"bad \xfe\n")
    assert run("--trainpref", path, "--destdir", tmp_path / "out", "--tokenizer-path", model, "--workers", 2) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"ftk-preprocess: {path}:21: (byte 464) invalid UTF-8 (0xFF: invalid start byte); ")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.txt"]


def test_bad_documents_are_skipped_counted_and_listed(tmp_path, model, capsys):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"the cat\nbad \xff\n\n\nnul \x00\na mat\n\xe2\x80\x8b\xff\n")
    arguments = ["--trainpref", path, "--destdir", tmp_path / "out", "--tokenizer-path", model]
    assert run(*arguments, "--on-error", "skip") == 0
    train = json.loads((tmp_path / "out" / "preprocess.json").read_text())["splits"]["train"]
    assert train["documents"] == 2
    assert train["skipped"] == {"empty": 2, "invalid_utf8": 2, "nul": 1}
    assert [(p["reason"], p["line"], p["offset"]) for p in train["problems"]] == [
        ("invalid_utf8", 2, 12),
        ("nul", 5, 20),
        ("invalid_utf8", 7, 31),
    ]
    assert "train: skipped 2 empty, 2 invalid_utf8, 1 nul; listed in" in capsys.readouterr().out


def test_a_vocabulary_that_does_not_fit_the_text_is_told(tmp_path, capsys):
    vocabulary, text, shown = tmp_path / "vocab.txt", tmp_path / "text.txt", []
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n")
    arguments = ["--trainpref", text, "--tokenizer", "bert_wordpiece", "--tokenizer-path", vocabulary, "--overwrite"]
    for known in (999, 19, 1):
        text.write_text("the cat\n" * known + "dog\n")
        assert run(*arguments, "--destdir", tmp_path / "out") == 0
        shown += [line.split(":")[1] for line in capsys.readouterr().out.splitlines() if "unknown" in line]
    many = "; this vocabulary does not fit the text"
    assert shown == [" 2.56% of the tokens are unknown", f" 33.33% of the tokens are unknown{many}"]


MODEL = "MODEL"  # stands for the fixture's path
TEXT, ENCODED = ["--trainpref", "a.txt"], ["--trainpref", "a.txt", "--tokenizer-path", MODEL]
TRAINED = ["--trainpref", "a.txt", "--vocab-size", "300"]
USER_ERRORS = {
    "nothing to do": ([], "give at least one"),
    "missing file": (["--trainpref", "nowhere.txt", "--vocab-size", "280"], "nowhere.txt: no such file"),
    "pattern": (["--trainpref", "*.none", "--vocab-size", "280"], "*.none: no file matches"),
    "no vocabulary": (TEXT, "give --tokenizer-path (a vocabulary), or --vocab-size"),
    "both": ([*ENCODED, "--vocab-size", "9"], "leave out one of the two"),
    "other tokenizer": ([*TEXT, "--tokenizer", "gpt2_bpe"], "--tokenizer-path is missing"),
    "unknown tokenizer": ([*TEXT, "--tokenizer", "gpt3"], "unknown tokenizer 'gpt3'"),
    "training without text": (["--validpref", "a.txt", "--vocab-size", "300"], "give --trainpref"),
    "vocabulary too large": ([*TEXT, "--vocab-size", "30000"], "30000"),
    "workers": ([*TRAINED, "--workers", "0"], "workers is 0; it must be at least 1"),
    "choice": ([*TEXT, "--on-error", "ignore"], "must be one of raise, skip"),
    "bad vocabulary": ([*TEXT, "--tokenizer-path", "a.txt"], "a.txt"),
    "file as destination": ([*TRAINED, "--destdir", "a.txt"], "a file, not"),
    "file as parent": ([*TRAINED, "--destdir", "a.txt/b"], "is a file, not"),
    "no place": ([*TRAINED, "--destdir", "/proc/none/b"], "--destdir /proc/none/b: no folder can be made there (No "),
    "ratio of all": ([*ENCODED, "--valid-ratio", "1"], "--valid-ratio is 1.0; it must be at least 0 and below 1"),
    "ratios of all": ([*ENCODED, "--valid-ratio", "0.5", "--test-ratio", "0.5"], "--valid-ratio + --test-ratio is 1.0"),
    "two sources": ([*ENCODED, "--validpref", "a.txt", "--valid-ratio", "0.1"], "both make the split"),
    "ratio without text": (
        ["--validpref", "a.txt", "--tokenizer-path", MODEL, "--test-ratio", "0.1"],
        "--test-ratio is 0.1, but there is no trainpref to take documents from",
    ),
    "limits": ([*ENCODED, "--min-tokens", "5", "--max-tokens-per-document", "4"], "--max-tokens-per-document is 4"),
    "no tokens": ([*ENCODED, "--min-tokens", "0"], "--min-tokens is 0; it must be at least 1"),
    "normal form": ([*ENCODED, "--normalize", "nfd"], "must be one of none, nfc, nfkc"),
    "too small": (
        [*ENCODED, "--valid-ratio", "0.0001"],
        "no documents for valid (skipped: 1 empty); valid_ratio is 0.0001",
    ),
    "all too short": ([*ENCODED, "--min-tokens", "500"], "no documents for train (skipped: 1 empty, 20 too_short)"),
    "no end token": ([*ENCODED, "--append-eos"], "--append-eos: the tokenizer sentencepiece has no end token"),
    "no fields": (
        [*ENCODED, "--text-key", "body"],
        "text_key is 'body', but no input is read as JSON lines or as a table; give --format jsonl, or leave",
    ),
}


def test_the_command_alone_says_what_it_needs(capsys):
    assert run() == 2
    shown = capsys.readouterr().err
    assert "give at least one" in shown
    assert "--destdir is missing" in shown


@pytest.mark.parametrize("case", USER_ERRORS)
def test_mistakes_are_one_clear_message_and_leave_nothing(tmp_path, monkeypatch, capsys, model, case):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("\n".join([*sentences(20), ""]) + "\n")
    arguments, message = USER_ERRORS[case]
    destination = [] if "--destdir" in arguments else ["--destdir", "out"]
    assert run(*(model if argument == MODEL else argument for argument in arguments), *destination) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_an_existing_folder_is_replaced_only_when_asked_and_only_if_it_is_ours(tmp_path, corpus, model, capsys):
    out = tmp_path / "out"
    arguments = ["--trainpref", corpus, "--destdir", out, "--tokenizer-path", model, "--workers", 1]
    out.mkdir()  # an empty folder is as good as none
    assert run(*arguments) == 0
    before = tree(out)
    assert run(*arguments) == 2
    assert "exists already; choose another, or replace it with --overwrite" in capsys.readouterr().err

    corpus.write_bytes(b"good\n\xff\n")
    assert run(*arguments, "--overwrite") == 2  # a failed run keeps the old folder
    assert tree(out) == before
    corpus.write_text("the old house .\n")
    (out / "notes.txt").write_text("mine")
    assert run(*arguments, "--overwrite") == 2
    assert "did not write (notes.txt)" in capsys.readouterr().err
    (out / "notes.txt").unlink()
    assert tree(out) == before
    assert run(*arguments, "--overwrite") == 0
    assert len(IndexedDataset(out / "train")) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "train.txt"]
