"""The tokenizers give what the original GLM code gives (golden values)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftk.tokenizers import Tokenizer, build_tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "tokenizers"
NAMES = {
    "BertWordPieceTokenizer": "bert_wordpiece",
    "GPT2BPETokenizer": "gpt2_bpe",
    "ChineseSPTokenizer": "sentencepiece",
}


@pytest.fixture(scope="module", params=sorted(path.name for path in GOLDEN.glob("*.json")))
def golden(request: pytest.FixtureRequest, published: Path) -> tuple[dict[str, Any], Tokenizer]:
    values = json.loads((GOLDEN / request.param).read_text(encoding="utf-8"))
    options = {key: values[key] for key in ("block_symbols", "task_mask", "decoder_mask")}
    if values["tokenizer"] == "ChineseSPTokenizer":
        options["fix_command_token"] = values["fix_command_token"]
    return values, build_tokenizer(NAMES[values["tokenizer"]], path=published, special_tokens="glm", **options)


def test_there_are_six_golden_layouts() -> None:
    assert len(list(GOLDEN.glob("*.json"))) == 6


def test_ids_equal_the_original(golden: tuple[dict[str, Any], Tokenizer]) -> None:
    values, tokenizer = golden
    for case in values["cases"]:
        assert tokenizer.encode(case["text"], command_tokens=True) == case["ids"], case["text"]


def test_decoded_text_equals_the_original(golden: tuple[dict[str, Any], Tokenizer]) -> None:
    values, tokenizer = golden
    for case in values["cases"]:
        assert tokenizer.decode(case["ids"]) == case["decoded"], case["text"]


def test_command_tokens_and_sizes_equal_the_original(golden: tuple[dict[str, Any], Tokenizer]) -> None:
    values, tokenizer = golden
    assert {token.name: token.id for token in tokenizer.command_tokens} == values["command_tokens"]
    assert {token.name: token.text for token in tokenizer.command_tokens} == values["command_texts"]
    assert tokenizer.vocab_size == values["num_tokens"]
    assert tokenizer.padded_vocab_size(128) == values["padded_to_multiple_of_128"]


def test_text_without_command_tokens_is_the_same_in_both_modes(
    golden: tuple[dict[str, Any], Tokenizer],
) -> None:
    values, tokenizer = golden
    names = [token.text for token in tokenizer.command_tokens]
    plain = [case for case in values["cases"] if not any(name in case["text"] for name in names)]
    assert len(plain) >= 4
    for case in plain:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
