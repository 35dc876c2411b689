"""Training on text files and on fairseq's files, from the command line to validation."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ftk.tokenizers import build_tokenizer, load_tokenizer, with_special_tokens
from ftk_cli import data, train, validate
from tests.data.fairseq_files import write_fairseq

RUN = ["--task", "glm_blank", "--arch", "glm_tiny", "--seq-length", "32", "--batch-size", "2"]
RUN += ["--max-update", "2", "--num-workers", "0"]


@pytest.fixture
def words(tmp_path) -> Path:
    (tmp_path / "dict.txt").write_text("".join(f"w{i} {i}\n" for i in range(50)))
    build_tokenizer("fairseq_dict", path=tmp_path / "dict.txt").save(tmp_path / "words")
    return tmp_path / "words"


def test_a_run_on_text_files_and_its_validation_without_the_tokenizer_folder(tmp_path, words, capsys):
    (tmp_path / "texts").mkdir()
    for split, count in (("train", 40), ("valid", 8)):
        lines = (" ".join(f"w{(i * 7 + j) % 50}" for j in range(20)) for i in range(count))
        (tmp_path / "texts" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    given = [str(tmp_path / "texts"), "--dataset", "raw", "--tokenizer-folder", str(words)]
    assert train.main([*given, *RUN, "--save-dir", str(tmp_path / "run")]) == 0
    last = tmp_path / "run" / "checkpoint_last"
    assert load_tokenizer(last).fingerprint == with_special_tokens(load_tokenizer(words), "glm").fingerprint
    assert data.main(["show", *given, "--task", "glm_blank", "--seq-length", "32"]) == 0
    shutil.rmtree(words)  # the checkpoint needs nothing else
    assert validate.main([str(tmp_path / "texts"), "--path", str(last), "--max-samples", "2"]) == 0
    assert train.main([*given[:3], *RUN, "--save-dir", str(tmp_path / "other")]) == 2
    assert "--tokenizer-folder is missing" in capsys.readouterr().err


def test_a_run_on_fairseqs_files(tmp_path, capsys):
    generator = np.random.default_rng(0)
    (tmp_path / "fs").mkdir()
    (tmp_path / "fs" / "dict.txt").write_text("".join(f"w{i} {i}\n" for i in range(50)))
    for split, count in (("train", 40), ("valid", 8)):
        rows = [[*generator.integers(4, 54, size=20).tolist(), 2] for _ in range(count)]
        write_fairseq(tmp_path / "fs" / split, rows)
    assert train.main([str(tmp_path / "fs"), *RUN, "--save-dir", str(tmp_path / "run")]) == 0
    kept = tmp_path / "run" / "checkpoint_last" / "tokenizer"
    assert sorted(path.name for path in kept.iterdir()) == ["dict.txt", "ftk_tokenizer.json"]
    assert data.main(["stats", str(tmp_path / "fs")]) == 0
    assert data.main(["verify", str(tmp_path / "fs")]) == 0
    assert "the indexes are whole" in capsys.readouterr().out
