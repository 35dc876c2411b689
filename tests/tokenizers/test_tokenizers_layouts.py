"""Command tokens have the ids of the published models, for every family and option (reference/glm.md 4d)."""

from __future__ import annotations

import pytest

from ftk.errors import UserError
from ftk.tokenizers import SpecialTokens, Tokenizer
from ftk.tokenizers.command_tokens import (
    BERT_WORDPIECE,
    GPT2_BPE,
    ROBERTA_BPE,
    SENTENCEPIECE,
    SENTENCEPIECE_GENERIC,
    SENTENCEPIECE_UNFIXED,
    Layout,
    number,
    sentinel_rows,
)

BERT = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
GPT2 = {"<|endoftext|>": 50256}
ROBERTA = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 50264}
BLOCK, TASK, DECODER = "block_symbols", "task_mask", "decoder_mask"
BERT_BASE = {"pad": 0, "ENC": 101, "MASK": 103, "unk": 100, "sep": 102, "eos": 0}
CHINESE_BASE = {"pad": 50000, "eos": 50000, "sep": 50001, "ENC": 50002, "MASK": 50003, "unk": 50004}
GPT2_BLOCK = {"pad": 50256, "eos": 50256, "sop": 50257, "eop": 50258, "ENC": 50259, "MASK": 50260,
              "sep": 50261, "unk": 50262}  # fmt: skip
ROBERTA_BLOCK = {"pad": 2, "eos": 2, "sep": 2, "ENC": 0, "MASK": 50264, "unk": 3, "sop": 50265, "eop": 50266}
GENERIC_BASE = {"pad": 0, "eos": 1, "bos": 2, "unk": 3, "sep": 4, "L2R": 5, "ENC": 6, "MASK": 7}


@pytest.mark.parametrize(
    ("layout", "size", "vocab", "enabled", "expected"),
    [
        (BERT_WORDPIECE, 30522, BERT, [], BERT_BASE),
        (BERT_WORDPIECE, 30522, BERT, [BLOCK], BERT_BASE | {"sop": 30522, "eop": 30523}),
        (BERT_WORDPIECE, 30522, BERT, [BLOCK, DECODER],
         BERT_BASE | {"sop": 30522, "eop": 30523, "dBLOCK": 30524}),
        (BERT_WORDPIECE, 30522, BERT, [BLOCK, TASK, DECODER],
         BERT_BASE | {"sop": 30522, "eop": 30523, "gMASK": 30524, "sMASK": 30525, "dBLOCK": 30526}),
        (GPT2_BPE, 50257, GPT2, [], {"pad": 50256, "eos": 50256}),
        (GPT2_BPE, 50257, GPT2, [BLOCK], GPT2_BLOCK),
        (GPT2_BPE, 50257, GPT2, [BLOCK, TASK, DECODER],
         GPT2_BLOCK | {"gMASK": 50263, "sMASK": 50264, "dBLOCK": 50265}),
        (ROBERTA_BPE, 50265, ROBERTA, [BLOCK], ROBERTA_BLOCK),
        (ROBERTA_BPE, 50265, ROBERTA, [BLOCK, TASK, DECODER],
         ROBERTA_BLOCK | {"gMASK": 50267, "sMASK": 50268, "dBLOCK": 50269}),
        (SENTENCEPIECE, 50000, {}, [], CHINESE_BASE),
        (SENTENCEPIECE, 50000, {}, [BLOCK, TASK, DECODER],
         CHINESE_BASE | {"sop": 50006, "eop": 50007, "sMASK": 50008, "gMASK": 50009, "dBLOCK": 50010}),
        (SENTENCEPIECE_UNFIXED, 50000, {}, [BLOCK], CHINESE_BASE | {"sop": 50006, "eop": 50007}),
        (SENTENCEPIECE_UNFIXED, 50000, {}, [BLOCK, TASK, DECODER],
         CHINESE_BASE | {"sop": 50006, "eop": 50007, "gMASK": 50007, "sMASK": 50008, "dBLOCK": 50009}),
        (SENTENCEPIECE_GENERIC, 1000, {}, [], GENERIC_BASE),
        (SENTENCEPIECE_GENERIC, 1000, {}, [BLOCK, TASK],
         GENERIC_BASE | {"sop": 1008, "eop": 1009, "sMASK": 1010, "gMASK": 1011}),
    ],
)  # fmt: skip
def test_ids_of_the_published_models(
    layout: Layout, size: int, vocab: dict[str, int], enabled: list[str], expected: dict[str, int]
) -> None:
    tokens, _ = number(layout, num_text_tokens=size, vocab=vocab, enabled=enabled)
    assert {token.name: token.id for token in tokens} == expected


def test_bert_sentinels_follow_in_pairs() -> None:
    layout = Layout(last=BERT_WORDPIECE.last + sentinel_rows(2))
    tokens, _ = number(layout, num_text_tokens=30522, vocab=BERT, enabled=[BLOCK, TASK])
    assert [(token.name, token.text, token.id) for token in tokens[-4:]] == [
        ("MASK1", "[MASK1]", 30526),
        ("sop1", "<|startofpiece1|>", 30527),
        ("MASK2", "[MASK2]", 30528),
        ("sop2", "<|startofpiece2|>", 30529),
    ]
    assert SpecialTokens.of(tokens).sentinels == ((30526, 30527), (30528, 30529))


def test_which_tokens_swallow_white_space_on_their_left() -> None:
    for layout, vocab in (
        (GPT2_BPE, GPT2),
        (ROBERTA_BPE, ROBERTA),
        (SENTENCEPIECE, {}),
        (SENTENCEPIECE_UNFIXED, {}),
    ):
        tokens, _ = number(layout, num_text_tokens=50300, vocab=vocab, enabled=[BLOCK, TASK, DECODER])
        assert {token.name for token in tokens if token.lstrip} == {"MASK", "gMASK", "sMASK"}
    tokens, _ = number(BERT_WORDPIECE, num_text_tokens=30522, vocab=BERT, enabled=[BLOCK, TASK, DECODER])
    assert not any(token.lstrip for token in tokens)


def test_a_vocabulary_of_another_kind_is_refused() -> None:
    with pytest.raises(UserError, match=r"x\.txt: holds no \[PAD\], \[CLS\], \[MASK\], \[UNK\], \[SEP\]"):
        number(BERT_WORDPIECE, num_text_tokens=50257, vocab=GPT2, where="x.txt")


def test_roles_and_blanks_of_the_special_tokens() -> None:
    tokens, _ = number(SENTENCEPIECE, num_text_tokens=10, enabled=[BLOCK, TASK])
    special = SpecialTokens.of(tokens)
    assert special == SpecialTokens(
        pad=10, eos=10, sep=11, cls=12, mask=13, unk=14, sop=16, eop=17, smask=18, gmask=19, dblock=None
    )
    assert special.mask_ids == (13, 18, 19)
    tokens, _ = number(BERT_WORDPIECE, num_text_tokens=30522, vocab=BERT)
    assert SpecialTokens.of(tokens).mask_ids == (103,)
    assert SpecialTokens.of(tokens).sop is None


def test_every_id_has_room_in_the_vocabulary(tiny: Tokenizer) -> None:
    assert max(token.id for token in tiny.command_tokens) < tiny.vocab_size


@pytest.mark.parametrize("multiple", [1, 3, 128])
def test_padding_to_a_multiple(tiny: Tokenizer, multiple: int) -> None:
    padded = tiny.padded_vocab_size(multiple)
    assert padded % multiple == 0
    assert 0 <= padded - tiny.vocab_size < multiple
    with pytest.raises(UserError, match="at least 1"):
        tiny.padded_vocab_size(0)
