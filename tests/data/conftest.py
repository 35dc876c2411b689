"""Small SentencePiece models for the tests of preprocessing."""

from __future__ import annotations

from pathlib import Path

import pytest
from preprocessing import sentences

from ftk.tokenizers import train_sentencepiece


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """Of the sentences of `preprocessing`."""
    return train_sentencepiece(sentences(500), tmp_path_factory.mktemp("model"), vocab_size=280)


@pytest.fixture(scope="session")
def letters_model(tmp_path_factory) -> Path:
    """Of words of all letters."""
    text = [" ".join(chr(97 + (i * 7 + k) % 26) * (k % 4 + 1) for k in range(9)) for i in range(200)]
    return train_sentencepiece(text, tmp_path_factory.mktemp("model"), vocab_size=350)


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A text of 3,000 lines."""
    path = tmp_path / "train.txt"
    path.write_text("".join(f"{line}\n" for line in sentences(3000, seed=1)), encoding="utf-8")
    return path
