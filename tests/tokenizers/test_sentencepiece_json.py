"""tokenizer.json of SentencePiece tokenizers: the library and `transformers` give the same ids."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from slow_tokenizers import SENTENCES

from ftk.tokenizers import build_tokenizer
from ftk.tokenizers.grow import grow_tokenizer
from ftk.tokenizers.sentencepiece_json import json_files

TEXTS = [
    *SENTENCES,
    "",
    " two  spaces, and one at the end ",
    "a tab\tand a line\nand another\r\n",
    "\uff21\uff22\uff23 \ufb01sh caf\u00e9 cafe\u0301 \u2460 \U0001f600\U0001f468\u200d\U0001f469",
    "the \u2581 sign of a space, \u2581\u2581 two",
    "never <|start or [mask",
    "\u5728\u5728\u5728\u3000\u4eba\u4eec\uff0c\u51ef\u65cb\u95e8\u3002 zzzzqqqq ~~~",
]
KINDS = {
    "unigram": {},
    "unigram, as SentencePiece normalizes": {"normalization_rule_name": "nmt_nfkc"},
    "unigram without bytes": {"byte_fallback": False},
    "unigram that keeps all spaces": {"remove_extra_whitespaces": False},
    "unigram without a space in front": {"add_dummy_prefix": False},
    "unigram, pieces across words": {"split_by_whitespace": False},
    "unigram with a user's piece": {"user_defined_symbols": ["<n>"]},
    "pairs with pieces of a user in one another": {
        "model_type": "bpe",
        "user_defined_symbols": ["<n>", "<n><n>", "<n"],
    },
    "pairs": {"model_type": "bpe"},
    "pairs, as SentencePiece normalizes": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc_cf"},
    "pairs with a user's piece": {"model_type": "bpe", "user_defined_symbols": ["<n>"]},
    "characters": {"model_type": "char", "vocab_size": 300},
    "own special pieces": {"bos_id": 1, "eos_id": 2, "pad_id": 3},
}
LAYOUTS = ("plain", "with_end", "with_mask", "with_sentinels", "glm")


def _trained(folder: Path, **options: Any) -> Path:
    model = io.BytesIO()
    usual = {"vocab_size": 330, "byte_fallback": True, "normalization_rule_name": "identity", "hard_vocab_limit": False}
    ids = {"unk_id": 0, "bos_id": -1, "eos_id": -1, "pad_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3), model_writer=model, minloglevel=2, **(usual | ids | options)
    )
    folder.mkdir(exist_ok=True)
    (folder / "a.model").write_bytes(model.getvalue())
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_gives_the_same_ids(tmp_path, kind) -> None:
    folder = _trained(tmp_path, **KINDS[kind])
    for layout in LAYOUTS:
        own = build_tokenizer("sentencepiece", path=folder, special_tokens=layout)
        files = json_files(own, ([], []))
        made = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        assert made.get_vocab_size() == own.vocab_size
        assert {token.text: made.token_to_id(token.text) for token in own.command_tokens} == {
            token.text: token.id for token in own.command_tokens
        }
        for text in [*TEXTS, "a line<n> and <n>another", "<n<n><n><n>a<n<n>>"]:
            ids = own.encode(text)
            assert made.encode(text, add_special_tokens=False).ids == ids, (layout, text)
            if 0 not in ids:  # the unknown piece is shown otherwise
                assert made.decode(ids) == own.decode(ids)


@pytest.mark.parametrize("end", ["", "E4B8AD", "E4B8ADE4", "F09F99", "FF", "F09F9982F09FE4B8AD", "EDA080"])
def test_broken_bytes_leave_the_characters_beside_them(tmp_path, end) -> None:
    own = build_tokenizer("sentencepiece", path=_trained(tmp_path), special_tokens="with_end")
    (tmp_path / "json").mkdir()
    for name, content in json_files(own, ([], [])).items():
        (tmp_path / "json" / name).write_bytes(content)
    made = build_tokenizer("hf", path=tmp_path / "json")
    first = next(one for one in range(own.vocab_size) if own.token_text(one) == "<0x00>")
    for ids in (
        [*own.encode("the lazy dog"), *(first + byte for byte in bytes.fromhex(end + after))] for after in ("", "61")
    ):
        assert made.decode(ids) == own.decode(ids)


def test_what_is_written_beside_it(tmp_path) -> None:
    own = build_tokenizer("sentencepiece", path=_trained(tmp_path), special_tokens="with_mask")
    first, last = own.special.cls, own.special.sep
    files = json_files(own, ([first], [last]))
    made = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    one, two = own.encode("a text"), own.encode("the lazy dog")
    assert made.encode("a text").ids == [first, *one, last]
    assert made.encode("a text", "the lazy dog").ids == [first, *one, last, *two, last]
    assert made.encode("a [MASK]", add_special_tokens=False).ids == own.encode("a [MASK]", command_tokens=True)
    assert json.loads(files["tokenizer_config.json"]) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "unk_token": "<unk>",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    }


def test_added_tokens_are_found_within_words(tmp_path) -> None:
    own = build_tokenizer("sentencepiece", path=_trained(tmp_path / "model"), special_tokens="with_end")
    grown = grow_tokenizer(own, ["quantum", "\u91cf\u5b50"], tmp_path / "grown").tokenizer
    made = tokenizers.Tokenizer.from_str(json_files(grown, ([], []))["tokenizer.json"].decode())
    for text in ("the quantum dog", "aquantums", "\u5728\u91cf\u5b50\u91cf\u5b50 quantum"):
        ids = grown.encode(text)
        assert made.encode(text, add_special_tokens=False).ids == ids


@pytest.mark.parametrize("name", ["cog-pretrain.model"])
def test_published_vocabularies(published, name) -> None:
    own = build_tokenizer("sentencepiece", path=published / name, special_tokens="with_end")
    made = tokenizers.Tokenizer.from_str(json_files(own, ([], []))["tokenizer.json"].decode())
    for text in TEXTS:
        assert made.encode(text, add_special_tokens=False).ids == own.encode(text), text


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ({"model_type": "word", "vocab_size": 30, "byte_fallback": False}, {}),
        ({}, {"special_tokens": "glm", "layout": "generic"}),  # <unk> is a command token there, and a piece
    ],
)
def test_what_the_library_cannot_do_is_not_written(tmp_path, kind, options) -> None:
    own = build_tokenizer("sentencepiece", path=_trained(tmp_path, **kind), **options)
    assert json_files(own, ([], [])) == {}
