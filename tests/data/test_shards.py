"""ftk-preprocess --shard I/N on many machines and ftk-data merge: what one machine writes, byte for byte."""

from __future__ import annotations

import functools
import gzip
import json
import shutil
from pathlib import Path

import pytest
from preprocessing import run, sentences, tree

from ftk.data import IndexedDataset
from ftk.data.inspect_data import verify
from ftk.data.text import preprocess as preprocess_module
from ftk.data.text.files import cut_file
from ftk.data.text.merge import merge as merge_shards
from ftk.errors import UserError
from ftk_cli.data import main as data_main

SHARDS = 4


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Files of some 10 KB in several parts."""
    monkeypatch.setattr(preprocess_module, "cut_file", functools.partial(cut_file, part_bytes=1000))


def lines(path: Path) -> list[object]:
    for seed, name in enumerate(("a.txt", "b.txt")):
        (path / name).write_text("\n".join(sentences(150, seed)), encoding="utf-8")
    (path / "empty.txt").touch()
    (path / "valid.txt").write_text("".join(f"{line}\n" for line in sentences(40, 7)), encoding="utf-8-sig")
    return ["--trainpref", f"{path}/a.txt,{path}/empty.txt,{path}/b.txt", "--validpref", path / "valid.txt"]


def bad_json(path: Path) -> list[object]:
    rows = [json.dumps({"text": text}) for text in sentences(300, 1)]
    rows[::7] = ["{"] * len(rows[::7])
    rows[3] = json.dumps({"\ud800": 1})
    (path / "a.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return ["--trainpref", path / "a.jsonl", "--on-error", "skip"]


def paragraphs(path: Path) -> list[object]:
    texts = ["\n".join(sentences(3, seed)) for seed in range(80)]
    blank = ["\n\n", "\n \t\n", "\r\n\r\n", "\n\n\n\n"]
    text = "".join(text + blank[number % 4] for number, text in enumerate(texts)).encode().replace(b"seven", b"\xff")
    (path / "a.txt").write_bytes(b"\xef\xbb\xbf\n\n" + text)
    return ["--trainpref", path / "a.txt", "--document-separator", "blank-line", "--on-error", "skip"]


def compressed(path: Path) -> list[object]:
    for seed in range(6):
        text = "\n".join(sentences(60, seed)).encode()
        (path / f"{seed}.txt.gz").write_bytes(gzip.compress(text.replace(b"seven", b"\0")))
    return ["--trainpref", path, "--on-error", "skip"]


def whole_files(path: Path) -> list[object]:
    for seed in range(9):
        (path / f"{seed}.md").write_text("\n".join(sentences(4, seed)), encoding="utf-8")
    return ["--trainpref", path, "--document-separator", "file"]


def repeats(path: Path) -> list[object]:
    (path / "a.txt").write_text("\n".join(sentences(250, 1) + sentences(250, 1)), encoding="utf-8")
    return ["--trainpref", path / "a.txt", "--dedup", "--valid-ratio", 0.2, "--min-tokens", 9]


def long_lines(path: Path) -> list[object]:
    texts = sentences(200, 1)
    texts[20] = texts[120] = "the cat " * 600
    (path / "a.txt").write_text("\n".join(texts), encoding="utf-8")
    return ["--trainpref", path / "a.txt", "--max-document-bytes", 90, "--on-error", "skip"]


def long_paragraphs(path: Path) -> list[object]:
    texts = [text * (1000 if number % 3 else 1) for number, text in enumerate(sentences(60, 1, end="\n"))]
    (path / "a.txt").write_text("\n".join(texts), encoding="utf-8")
    limits = ["--max-document-bytes", 900, "--on-error", "skip"]
    return ["--trainpref", path / "a.txt", "--document-separator", "blank-line", *limits]


def pairs(path: Path) -> list[object]:
    for seed in range(5):
        for number, language in enumerate(("en", "de")):
            (path / f"{seed}.{language}").write_text("\n".join(sentences(30, 2 * seed + number)), encoding="utf-8")
    prefixes = ",".join(str(path / str(seed)) for seed in range(5))
    return ["--trainpref", prefixes, "--source-lang", "en", "--target-lang", "de", "--special-tokens", "with_end"]


def preprocess(arguments: list[object], model: Path, out: Path, *more: object) -> None:
    shared = ["--tokenizer", "sentencepiece", "--tokenizer-path", model, "--workers", 1]
    assert run(*arguments, *shared, "--destdir", out, *more) == 0


def all_shards(arguments: list[object], model: Path, folder: Path, count: int = SHARDS) -> list[Path]:
    folders = [folder / str(number) for number in range(1, count + 1)]
    for number, out in enumerate(folders, start=1):
        preprocess(arguments, model, out, "--shard", f"{number}/{count}")
    return folders


def merge(folders: list[Path], out: Path) -> int:
    return data_main(["merge", "--shards", *map(str, folders), "--destdir", str(out)])


@pytest.mark.parametrize(
    "case",
    [lines, bad_json, paragraphs, compressed, whole_files, repeats, long_lines, long_paragraphs, pairs],
    ids=lambda case: case.__name__,
)
def test_merged_shards_are_byte_equal_to_one_run(case, tmp_path, model):
    (tmp_path / "text").mkdir()
    arguments = case(tmp_path / "text")
    preprocess(arguments, model, tmp_path / "whole")
    folders = all_shards(arguments, model, tmp_path / "shards")
    assert sum(len(IndexedDataset(folder / "train")) > 0 for folder in folders) >= 3

    assert merge(folders[::-1], tmp_path / "merged") == 0
    assert tree(tmp_path / "merged") == tree(tmp_path / "whole")
    assert verify(tmp_path / "merged") == []


def test_a_shard_that_is_run_again_writes_the_same(tmp_path, model):
    arguments = lines(tmp_path)
    preprocess(arguments, model, tmp_path / "out", "--shard", "2/3")
    before = tree(tmp_path / "out")
    preprocess(arguments, model, tmp_path / "out", "--shard", "2/3", "--overwrite")
    assert tree(tmp_path / "out") == before


def test_a_pattern_names_the_shards_and_more_shards_than_parts_leave_some_empty(tmp_path, model, capsys):
    arguments = lines(tmp_path)
    all_shards(arguments, model, tmp_path / "shards", 25)
    preprocess(arguments, model, tmp_path / "whole")
    capsys.readouterr()
    assert merge([tmp_path / "shards" / "*"], tmp_path / "merged") == 0
    assert tree(tmp_path / "merged") == tree(tmp_path / "whole")
    shown = capsys.readouterr().out
    assert "train: 300 documents" in shown
    assert "of 25 shards" in shown


def test_a_problem_within_a_file_is_named_by_its_byte(tmp_path, model, capsys):
    text = "\n".join(sentences(300, 1)).encode()
    at = text.rindex(b"the")
    (tmp_path / "a.txt").write_bytes(text[:at] + b"\xff" + text[at:])
    shared = ["--tokenizer-path", model, "--workers", 1, "--trainpref", tmp_path / "a.txt"]
    assert run(*shared, "--destdir", tmp_path / "whole") == 2
    assert f"a.txt:{text.count(10, 0, at) + 1}: (byte {at}) invalid UTF-8" in capsys.readouterr().err
    assert run(*shared, "--destdir", tmp_path / "out", "--shard", "3/3") == 2
    assert f"a.txt: (byte {at}) invalid UTF-8" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "0/4"], "shard is '0/4'; it must be I/N"),
        (["--shard", "5/4"], "shard is '5/4'"),
        (["--shard", "2"], "shard is '2'"),
        (["--shard", "1/2", "--vocab-size", 300], "training a tokenizer needs all of it: train one first"),
    ],
)
def test_wrong_shards_are_refused(arguments, message, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat .\n", encoding="utf-8")
    path = [] if "--vocab-size" in arguments else ["--tokenizer-path", tmp_path]
    assert run("--trainpref", tmp_path / "a.txt", *path, "--destdir", tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory, model) -> Path:
    """A text with two shards of it, in folders 1 and 2, and all of it in the folder whole."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "text").mkdir()
    arguments = lines(folder / "text")
    all_shards(arguments, model, folder, 2)
    preprocess(arguments, model, folder / "whole")
    return folder


def other_settings(folder: Path, model: Path, other_model: Path) -> None:
    preprocess(lines(folder / "text"), model, folder / "2", "--shard", "2/2", "--overwrite", "--min-tokens", 3)


def other_tokenizer(folder: Path, model: Path, other_model: Path) -> None:
    preprocess(lines(folder / "text"), other_model, folder / "2", "--shard", "2/2", "--overwrite")


def other_text(folder: Path, model: Path, other_model: Path) -> None:
    arguments = lines(folder / "text")
    preprocess(arguments, model, folder / "1", "--shard", "1/2", "--overwrite")  # of the same names
    (folder / "text" / "a.txt").write_text("the cat .\n" * 900, encoding="utf-8")
    preprocess(arguments, model, folder / "2", "--shard", "2/2", "--overwrite")


def other_count(folder: Path, model: Path, other_model: Path) -> None:
    preprocess(lines(folder / "text"), model, folder / "2", "--shard", "2/3", "--overwrite")


def twice(folder: Path, model: Path, other_model: Path) -> None:
    shutil.rmtree(folder / "2")
    shutil.copytree(folder / "1", folder / "2")


def truncated(folder: Path, model: Path, other_model: Path) -> None:
    (folder / "1" / "train.bin").write_bytes(b"")


def altered(folder: Path, model: Path, other_model: Path) -> None:
    path = folder / "1" / "train.bin"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def damaged(folder: Path, model: Path, other_model: Path) -> None:
    record = folder / "2" / "preprocess.json"
    record.write_text(record.read_text(encoding="utf-8").replace('"line_ends"', '"lines"'), encoding="utf-8")


def no_shard(folder: Path, model: Path, other_model: Path) -> None:
    shutil.rmtree(folder / "2")
    shutil.copytree(folder / "whole", folder / "2")


def no_record(folder: Path, model: Path, other_model: Path) -> None:
    shutil.rmtree(folder / "2")
    (folder / "2").mkdir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_settings, "2 differs from {folder}/1 in settings, min_tokens (3 and 1); run shard 2/2 again"),
        (other_tokenizer, "in tokenizer, fingerprint ("),
        (other_text, "2 was made of other files than {folder}/1"),
        (other_count, "1 is shard 1/2, {folder}/2 2/3: they are of two runs"),
        (twice, "{folder}/1 and {folder}/2 are both shard 1/2"),
        (truncated, "1/train.bin: 0 bytes, preprocess.json says"),
        (altered, "1/train.bin: altered, preprocess.json has another sha256; run shard 1/"),
        (damaged, "2/preprocess.json: damaged (KeyError('line_ends')); run this shard again"),
        (no_shard, "2: not written with --shard"),
        (no_record, "2/preprocess.json: No such file or directory; --shards are folders written with --shard"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_merging_what_is_not_one_run_is_refused(change, message, two_shards, tmp_path, model, letters_model, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(two_shards, folder)
    change(folder, model, letters_model)
    capsys.readouterr()
    for shards in ([folder / "1", folder / "2"], [f"{folder / '1'},{folder / '2'}"]):
        assert merge(shards, tmp_path / "out") == 2
        assert message.format(folder=folder) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_shard_is_named(two_shards, tmp_path, capsys):
    assert merge([two_shards / "2"], tmp_path / "out") == 2
    assert "of 2 shards these are missing: 1; run ftk-preprocess with --shard 1/2" in capsys.readouterr().err
    with pytest.raises(UserError, match="run ftk-preprocess with `shard` 1/2"):
        merge_shards([str(two_shards / "2")], str(tmp_path / "out"), overwrite=False)
