"""Special tokens of any layout: roles, ids within the vocabulary, a vocabulary's own tokens."""

from __future__ import annotations

import pickle

import pytest

from ftk.errors import UserError
from ftk.tokenizers import SpecialTokens, Tokenizer, build_tokenizer, load_tokenizer, with_special_tokens


def test_a_role_that_nobody_has_is_none() -> None:
    special = pickle.loads(pickle.dumps(SpecialTokens(eos=3, sep=4, bos=None)))
    assert special == SpecialTokens(eos=3, sep=4)
    assert (special.eos, special.sep, special.bos, special.other) == (3, 4, None, None)


@pytest.mark.parametrize(
    ("name", "vocabulary", "expected"),
    [
        ("bert_wordpiece", "tiny_bert", {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}),
        ("gpt2_bpe", "tiny_gpt2", {"bos": 264, "eos": 264, "pad": 264}),
        ("gpt2_bpe", "tiny_roberta", {"bos": 0, "pad": 1, "eos": 2, "unk": 3, "mask": 269}),
        ("sentencepiece", "tiny_sentencepiece", {"unk": 0}),
    ],
)
def test_plain_special_tokens_are_those_of_the_vocabulary(request, tmp_path, name, vocabulary, expected) -> None:
    path = request.getfixturevalue(vocabulary)
    tokenizer = build_tokenizer(name, path=path)
    assert tokenizer.special.roles == expected
    assert tokenizer.vocab_size == tokenizer.num_text_tokens
    assert tokenizer.fingerprint != build_tokenizer(name, path=path, special_tokens="glm").fingerprint
    with_end = with_special_tokens(tokenizer, "with_end")
    assert with_end.special.roles == {"eos": tokenizer.vocab_size, **expected}
    assert (with_end is tokenizer) == ("eos" in expected)
    assert (with_special_tokens(with_end, "glm") is with_end) == ("eos" not in expected)
    with_mask = with_special_tokens(tokenizer, "with_mask")
    mask = with_mask.special.mask
    spelled = f"the sea {with_mask.token_text(mask)}"  # the space in front is the mask's
    assert with_mask.encode(spelled, command_tokens=True) == [*tokenizer.encode("the sea"), mask]
    with_sentinels = with_special_tokens(tokenizer, "with_sentinels")
    first = with_sentinels.vocab_size - 1  # as T5's: the first sentinel has the highest id
    assert [with_sentinels.token_text(first - n) for n in (0, 1, 99)] == [f"<extra_id_{n}>" for n in (0, 1, 99)]
    special = with_sentinels.special
    assert special.pad not in (None, special.eos)
    assert special.eos is not None
    few = build_tokenizer(name, path=path, special_tokens="with_sentinels", extra_ids=3)
    assert few.vocab_size == with_sentinels.vocab_size - 97
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    assert tokenizer.decode(tokenizer.encode("the sea")).strip() == "the sea"


@pytest.mark.parametrize("has_end", [("gpt2_bpe", "tiny_gpt2"), ("bert_wordpiece", "tiny_bert")])
@pytest.mark.parametrize("side", ["target", "source"])
def test_sources_and_targets_get_what_their_own_vocabulary_lacks(request, side, has_end, tiny_sentencepiece) -> None:
    other = build_tokenizer(has_end[0], path=request.getfixturevalue(has_end[1]))
    plain = build_tokenizer("sentencepiece", path=tiny_sentencepiece)
    tokenizer, tokenizer.source = (plain, other) if side == "target" else (other, plain)
    before = tokenizer.fingerprint
    made = with_special_tokens(tokenizer, "with_end")
    completed, kept = (made, made.of_source) if side == "target" else (made.of_source, made)
    assert completed.special.eos == plain.vocab_size
    assert plain.special.eos is None
    assert kept.own_fingerprint == with_special_tokens(other, "with_end").own_fingerprint
    assert made.fingerprint != before == tokenizer.fingerprint
    assert with_special_tokens(made, "with_end") is made


def test_every_id_has_room_in_the_vocabulary(tiny: Tokenizer) -> None:
    assert max(token.id for token in tiny.command_tokens) < tiny.vocab_size


@pytest.mark.parametrize("multiple", [1, 3, 128])
def test_padding_to_a_multiple(tiny: Tokenizer, multiple: int) -> None:
    padded = tiny.padded_vocab_size(multiple)
    assert padded % multiple == 0
    assert 0 <= padded - tiny.vocab_size < multiple
    with pytest.raises(UserError, match="at least 1"):
        tiny.padded_vocab_size(0)
