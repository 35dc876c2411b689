"""Vocabularies for the tokenizer tests: tiny ones made here, the published ones where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slow_tokenizers import BYTE_LETTERS, SENTENCES

from ftk.tokenizers import Tokenizer, build_tokenizer, train_sentencepiece


@pytest.fixture(scope="session")
def published(test_data: Path) -> Path:
    """Folder of the published vocabularies."""
    return test_data / "tokenizers"


@pytest.fixture(scope="session")
def hostile(test_data: Path) -> Path:
    return test_data / "hostile"


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-[]<>|()σςαι中大人"
    words = ["the", "mask", "start", "##ing", "##piece", "of", "un", "##able"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + x for x in letters), *words]
    path = tmp_path_factory.mktemp("bert") / "tiny-vocab.txt"
    path.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return path


def byte_level_files(folder: Path, before: list[str], after: list[str]) -> Path:
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("Ġ", "a"), ("l", "l"), ("ä", "½")]
    tokens = [*before, *BYTE_LETTERS.values(), *(left + right for left, right in merges), *after]
    vocab = json.dumps({token: id_ for id_, token in enumerate(tokens)})
    (folder / "vocab.json").write_text(vocab, encoding="utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_files(tmp_path_factory.mktemp("gpt2"), [], ["<|endoftext|>"])


@pytest.fixture(scope="session")
def tiny_roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roberta")
    return byte_level_files(folder, ["<s>", "<pad>", "</s>", "<unk>"], ["<|endoftext|>", "<mask>"])


@pytest.fixture(scope="session")
def tiny_sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(SENTENCES * 3, tmp_path_factory.mktemp("sentencepiece"), vocab_size=320)


@pytest.fixture(scope="session", params=["bert_wordpiece", "gpt2_bpe", "roberta", "sentencepiece", "generic"])
def tiny(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind of tokenizer, on a tiny vocabulary, with all its command tokens."""
    if request.param == "bert_wordpiece":
        path = request.getfixturevalue("tiny_bert")
        return build_tokenizer("bert_wordpiece", path=path, decoder_mask=True, sentinel_tokens=3, special_tokens="glm")
    if request.param in ("gpt2_bpe", "roberta"):
        path = request.getfixturevalue("tiny_gpt2" if request.param == "gpt2_bpe" else "tiny_roberta")
        return build_tokenizer("gpt2_bpe", path=path, decoder_mask=True, special_tokens="glm")
    layout = "generic" if request.param == "generic" else "glm"
    path = request.getfixturevalue("tiny_sentencepiece")
    return build_tokenizer("sentencepiece", path=path, layout=layout, decoder_mask=True, special_tokens="glm")
