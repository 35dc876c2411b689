"""Names on the Hugging Face hub in place of files: one line says how to download them."""

from __future__ import annotations

import pytest

import ftk
from ftk.errors import UserError, download_hint
from ftk_cli import checkpoint, generate, preprocess, train, validate

MODEL = "to read a model of the Hugging Face hub, download it (hf download org/name --local-dir name) and give the "
DATA = "a dataset of the Hugging Face hub, download it (hf download org/name --repo-type dataset --local-dir name) and"


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (validate.main, "data --path hf://org/name", f"hf://org/name: no such folder; {MODEL}"),
        (generate.main, "--path org/name --input -", MODEL),
        (checkpoint.main, "convert --from hf org/name out", MODEL),
        (checkpoint.main, "convert --from hf hf://org/name out", MODEL),
        (train.main, "org/name --arch gpt2_tiny --max-update 1", f"ftk-preprocess --destdir org/name; to read {DATA}"),
        (train.main, "hf://datasets/org/name --arch gpt2_tiny --max-update 1", DATA),
        (preprocess.main, "--trainpref hf://datasets/org/name/train.parquet --destdir o --vocab-size 300", DATA),
        (
            preprocess.main,
            "--trainpref org/name --destdir o --vocab-size 300",
            f"no such file or folder; to read {DATA}",
        ),
        (preprocess.main, "--trainpref text --destdir o --tokenizer hf --tokenizer-path org/name", MODEL),
        (preprocess.main, "--trainpref s3://a/b --destdir o --vocab-size 300", "only files on this machine are read"),
    ],
)
def test_commands_say_how_to_download(ask, main, arguments, message):
    code, out, err = ask(main, *arguments.split())
    assert (code, out, len(err)) == (2, [], 1)
    assert message in err[0]


def test_python_says_it_too():
    with pytest.raises(UserError, match="hf download org/name --local-dir name"):
        ftk.load_generator("hf://org/name")


@pytest.mark.parametrize("name", ["run", "data/train.txt", "./org/name", "/org/name", "a/b/c", "../run", "run/.x", ""])
def test_paths_that_are_no_names_have_no_hint(name):
    assert download_hint(name, "model") == ""


def test_a_path_in_a_folder_that_is_there_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "hf download data/bin" in download_hint("data/bin", "dataset")
    (tmp_path / "data").mkdir()
    assert download_hint("data/bin", "dataset") == ""
    assert "hf download data/bin" in download_hint("hf://data/bin", "dataset")
