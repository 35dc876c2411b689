"""GLM's command tokens have the ids of the published models, for every kind of tokenizer and option."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ftk.errors import UserError
from ftk.tasks.glm_blank.command_tokens import GLMTokensConfig, glm_layout, sentinels
from ftk.tasks.glm_blank.samples.dataset import check_command_tokens
from ftk.tasks.glm_blank.task import GLMBlankConfig
from ftk.tokenizers.special_tokens import CommandToken, SpecialTokens, number

BERT = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
GPT2 = {"<|endoftext|>": 50256}
ROBERTA = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 50264}
BERT_BASE = {"pad": 0, "ENC": 101, "MASK": 103, "unk": 100, "sep": 102, "eos": 0}
CHINESE_BASE = {"pad": 50000, "eos": 50000, "sep": 50001, "ENC": 50002, "MASK": 50003, "unk": 50004}
GPT2_BLOCK = {"pad": 50256, "eos": 50256, "sop": 50257, "eop": 50258, "ENC": 50259, "MASK": 50260,
              "sep": 50261, "unk": 50262}  # fmt: skip
ROBERTA_BLOCK = {"pad": 2, "eos": 2, "sep": 2, "ENC": 0, "MASK": 50264, "unk": 3, "sop": 50265, "eop": 50266}
GENERIC_BASE = {"pad": 0, "eos": 1, "bos": 2, "unk": 3, "sep": 4, "L2R": 5, "ENC": 6, "MASK": 7}


def tokens_of(
    tokenizer: str, size: int, vocab: dict[str, int], block=True, task=False, decoder=False, **options: object
) -> list[CommandToken]:
    config = GLMTokensConfig(block_symbols=block, task_mask=task, decoder_mask=decoder, **options)
    layout = glm_layout(config, tokenizer=tokenizer, vocab=vocab)
    return number(layout, num_text_tokens=size, vocab=vocab, where="x.txt")[0]


BERT_V, GPT2_V = ("bert_wordpiece", 30522, BERT), ("gpt2_bpe", 50257, GPT2)
ROBERTA_V, CHINESE_V = ("gpt2_bpe", 50265, ROBERTA), ("sentencepiece", 50000, {})
NONE, ALL = {"block": False, "task": True, "decoder": True}, {"task": True, "decoder": True}
UNFIXED, GENERIC = {"fix_command_token": False}, {"layout": "generic"}


@pytest.mark.parametrize(
    ("vocabulary", "options", "expected"),
    [
        (BERT_V, NONE, BERT_BASE),
        (BERT_V, {}, BERT_BASE | {"sop": 30522, "eop": 30523}),
        (BERT_V, {"decoder": True}, BERT_BASE | {"sop": 30522, "eop": 30523, "dBLOCK": 30524}),
        (BERT_V, ALL, BERT_BASE | {"sop": 30522, "eop": 30523, "gMASK": 30524, "sMASK": 30525, "dBLOCK": 30526}),
        (GPT2_V, NONE, {"pad": 50256, "eos": 50256}),
        (GPT2_V, {}, GPT2_BLOCK),
        (GPT2_V, ALL, GPT2_BLOCK | {"gMASK": 50263, "sMASK": 50264, "dBLOCK": 50265}),
        (ROBERTA_V, {}, ROBERTA_BLOCK),
        (ROBERTA_V, ALL, ROBERTA_BLOCK | {"gMASK": 50267, "sMASK": 50268, "dBLOCK": 50269}),
        (CHINESE_V, NONE, CHINESE_BASE),
        (CHINESE_V, {"layout": "glm", **ALL},
         CHINESE_BASE | {"sop": 50006, "eop": 50007, "sMASK": 50008, "gMASK": 50009, "dBLOCK": 50010}),
        (CHINESE_V, UNFIXED, CHINESE_BASE | {"sop": 50006, "eop": 50007}),
        (CHINESE_V, UNFIXED | ALL,
         CHINESE_BASE | {"sop": 50006, "eop": 50007, "gMASK": 50007, "sMASK": 50008, "dBLOCK": 50009}),
        (("sentencepiece", 1000, {}), GENERIC | {"block": False}, GENERIC_BASE),
        (("sentencepiece", 1000, {}), GENERIC | {"task": True},
         GENERIC_BASE | {"sop": 1008, "eop": 1009, "sMASK": 1010, "gMASK": 1011}),
        (("of_a_plugin", 50000, {}), {}, CHINESE_BASE | {"sop": 50006, "eop": 50007}),
    ],
)  # fmt: skip
def test_ids_of_the_published_models(vocabulary, options, expected) -> None:
    assert {token.name: token.id for token in tokens_of(*vocabulary, **options)} == expected


def test_bert_sentinels_follow_in_pairs() -> None:
    tokens = tokens_of(*BERT_V, task=True, sentinel_tokens=2)
    assert [(token.name, token.text, token.id) for token in tokens[-4:]] == [
        ("MASK1", "[MASK1]", 30526),
        ("sop1", "<|startofpiece1|>", 30527),
        ("MASK2", "[MASK2]", 30528),
        ("sop2", "<|startofpiece2|>", 30529),
    ]
    assert sentinels(SpecialTokens.of(tokens)) == ((30526, 30527), (30528, 30529))
    assert sentinels(SpecialTokens.of(tokens_of(*GPT2_V))) == ()


def test_which_tokens_swallow_white_space_on_their_left() -> None:
    for vocabulary, options in ((GPT2_V, {}), (ROBERTA_V, {}), (CHINESE_V, {}), (CHINESE_V, UNFIXED)):
        tokens = tokens_of(*vocabulary, **ALL, **options)
        assert {token.name for token in tokens if token.lstrip} == {"MASK", "gMASK", "sMASK"}
    assert not any(token.lstrip for token in tokens_of(*BERT_V, **ALL))


def test_roles_of_the_special_tokens() -> None:
    special = SpecialTokens.of(tokens_of("sentencepiece", 10, {}, task=True))
    assert special == SpecialTokens(
        pad=10, eos=10, sep=11, cls=12, mask=13, unk=14, sop=16, eop=17, smask=18, gmask=19, dblock=None
    )
    assert SpecialTokens.of(tokens_of(*BERT_V, block=False)).sop is None


@pytest.mark.parametrize(
    ("vocabulary", "options", "message"),
    [
        (("bert_wordpiece", 50257, GPT2), {}, r"x\.txt: holds no \[PAD\], \[CLS\], \[MASK\], \[UNK\], \[SEP\]"),
        (GPT2_V, {"layout": "generic"}, "layout generic is not one of gpt2_bpe, which has auto, gpt2, roberta"),
        (CHINESE_V, {"sentinel_tokens": 1}, "only bert_wordpiece can have such pairs"),
    ],
)
def test_what_belongs_to_another_kind_of_tokenizer_is_refused(vocabulary, options, message) -> None:
    with pytest.raises(UserError, match=message):
        tokens_of(*vocabulary, **options)


@pytest.mark.parametrize(
    ("layout", "advice"),
    [
        ("glm", "preprocess with `special_tokens` plain, or glm and `block_symbols`$"),
        (None, "preprocess with another `tokenizer`, such as sentencepiece, or train another model, e.g. gpt2$"),
    ],
)
def test_a_tokenizer_without_the_tokens_of_blanks_is_refused_with_advice_that_works_for_it(layout, advice):
    tokenizer = SimpleNamespace(name="some", special=SpecialTokens(eos=1), special_tokens=layout)
    with pytest.raises(UserError, match=f"^the tokenizer some has no cls, mask, sop, eop, which .*; {advice}"):
        check_command_tokens(tokenizer, GLMBlankConfig())
