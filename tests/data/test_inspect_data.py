"""ftk-data stats and verify."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from preprocessing import run, sentences

from ftk.data import IndexedDataset
from ftk.data.corpora.indexed_corpus import IndexedCorpus, IndexedCorpusConfig
from ftk.data.inspect_data import stats
from ftk.errors import UserError
from ftk_cli import data as data_command


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "train.txt").write_text("".join(f"{line}\n" for line in sentences(3000, seed=1)), encoding="utf-8")
    arguments = ["--tokenizer-path", model, "--workers", 1]
    assert run("--trainpref", folder / "train.txt", "--destdir", folder / "data-bin", *arguments) == 0
    return folder / "data-bin"


@pytest.fixture
def made(tmp_path, folder) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "data-bin"))


def test_stats_counts_what_is_there(made, capsys):
    assert data_command.main(["stats", str(made)]) == 0
    shown = capsys.readouterr().out
    dataset = IndexedDataset(made / "train")
    assert f"train: 3,000 documents, {dataset.num_tokens:,} tokens (uint16)" in shown
    assert f"greatest {dataset.sizes.max():,}" in shown
    for low, high in ((8, 15), (16, 31)):
        count = int(((dataset.sizes >= low) & (dataset.sizes <= high)).sum())
        row = next(line for line in shown.splitlines() if line.split()[:1] == [f"{low}-{high}"])
        assert row.split()[1] == f"{count:,}"
    assert shown == stats(made) + "\n"


def alter(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)


DAMAGE = {
    "token": (lambda d: alter(d / "train.bin", 0), r"train.bin: its sha256 is not the one"),
    "vocabulary": (lambda d: alter(d / "train.bin", 1), r"train.bin: holds token \d+, outside the vocabulary"),
    "data cut": (lambda d: os.truncate(d / "train.bin", 100), r"train.bin: 100 bytes, but sequence"),
    "index cut": (lambda d: os.truncate(d / "train.idx", 100), r"train.idx: 100 bytes, preprocess.json says"),
    "index gone": (lambda d: (d / "train.idx").unlink(), r"train.idx: missing"),
    "length": (lambda d: alter(d / "train.idx", 34), r"sequence 1 starts at byte"),
    "stranger": (lambda d: (d / "x.txt").write_text("x"), r"x.txt: not listed in preprocess.json"),
    "tokenizer": (lambda d: alter(d / "tokenizer" / "sentencepiece.model"), r"sentencepiece.model: its sha256"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_verify_finds_damage(made, capsys, case):
    assert data_command.main(["verify", str(made)]) == 0
    assert "all files are as ftk-preprocess wrote them" in capsys.readouterr().out
    damage, message = DAMAGE[case]
    damage(made)
    assert data_command.main(["verify", str(made)]) == 2
    shown = capsys.readouterr().err

    assert re.search(message, shown)
    assert "Traceback" not in shown


@pytest.mark.parametrize("command", ["stats", "verify"])
def test_what_is_no_data_folder_is_refused(tmp_path, capsys, command):
    (tmp_path / "file").write_text("x")
    for name, message in (("none", "no such folder"), ("file", "a file; give the folder"), (".", "give ")):
        assert data_command.main([command, str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


NO_RECORDS = {
    "half of it": b"{",
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "no files": b'{"files": 1, "splits": {}, "tokenizer": null}',
    "files of other types": b'{"files": {"train.bin": 1}, "splits": {}, "tokenizer": null}',
    "bytes of another type": b'{"files": {"train.bin": {"bytes": "1"}}, "splits": {}, "tokenizer": null}',
    "huge bytes": b'{"files": {"train.bin": {"bytes": 1%s}}, "splits": {}, "tokenizer": null}' % (b"0" * 100),
    "a checksum of another type": b'{"files": {"a": {"bytes": 1, "sha256": 1}}, "splits": {}, "tokenizer": null}',
    "a file elsewhere": b'{"files": {"../a": {"bytes": 1}}, "splits": {}, "tokenizer": null}',
    "a file at the root": b'{"files": {"/a": {"bytes": 1}}, "splits": {}, "tokenizer": null}',
    "a NUL in a name": b'{"files": {"a\\u0000": {"bytes": 1}}, "splits": {}, "tokenizer": null}',
    "splits of another type": b'{"files": {}, "splits": [1], "tokenizer": null}',
    "documents of another type": b'{"files": {}, "splits": {"train": {"documents": true}}, "tokenizer": null}',
    "no tokenizer": b'{"files": {}, "splits": {}}',
    "a tokenizer of another type": b'{"files": {}, "splits": {}, "tokenizer": "x"}',
    "a vocabulary of another type": b'{"files": {}, "splits": {}, "tokenizer": {"vocab_size": "1", "fingerprint": ""}}',
    "a fingerprint of another type": b'{"files": {}, "splits": {}, "tokenizer": {"vocab_size": 1, "fingerprint": []}}',
    "a pipe": None,
}


@pytest.mark.parametrize("case", NO_RECORDS)
def test_whatever_stands_in_the_place_of_the_record_is_one_line(made, capsys, case):
    record = made / "preprocess.json"
    record.unlink()
    if NO_RECORDS[case] is None:
        os.mkfifo(record)
    else:
        record.write_bytes(NO_RECORDS[case])
    assert data_command.main(["verify", str(made)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{record}: damaged" in line
    with pytest.raises(UserError, match="is damaged"):
        IndexedCorpus(IndexedCorpusConfig(data=str(made))).tokenizer()


@pytest.mark.parametrize("name", ["train.idx", "train.bin"])
def test_a_pipe_in_the_place_of_a_data_file_is_one_line(made, capsys, name):
    (made / name).unlink()
    os.mkfifo(made / name)
    assert data_command.main(["stats", str(made)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{made / name}: not a regular file" in line
