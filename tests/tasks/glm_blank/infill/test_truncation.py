"""Prompts that are too long are cut around their blanks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.tasks.glm_blank import BlankFiller, BlankGenerator
from ftk.tasks.glm_blank.infill.config import FillConfig
from ftk.tasks.glm_blank.infill.truncation import truncate
from tests.generation.slow import small_model
from tests.tasks.glm_blank.infill.test_fill import own_tokenizer  # noqa: F401

CLS, EOS, MASK = 1, 2, 3
SIDES = ("left", "right", "middle")


@settings(max_examples=300, deadline=None)
@given(data=st.data(), side=st.sampled_from(SIDES), framed=st.booleans())
def test_what_is_left_is_one_piece_with_all_blanks_and_as_long_as_it_may_be(data, side, framed):
    before, inside, behind = (data.draw(st.integers(0, 12)) for _ in range(3))
    blanks = [MASK] * bool(inside) + list(range(100, 100 + max(inside - 2, 0))) + [MASK] * (inside > 1)
    text = [*range(10, 10 + before), *blanks, *range(200, 200 + behind)]
    context = [CLS, *text, EOS] if framed else text
    limit = data.draw(st.integers(0 if not framed else 2, len(context) + 2))
    room = limit - 2 * framed
    if not context:
        return
    if len(context) > limit and len(blanks) > room:
        with pytest.raises(UserError, match=f"{len(blanks)} tokens from the first to the last blank.* for {room};"):
            truncate(context, (MASK,), limit, side, (CLS, EOS))
        return
    found = truncate(context, (MASK,), limit, side, (CLS, EOS))
    assert len(found) == min(limit, len(context))
    if framed:
        assert (found[0], found[-1]) == (CLS, EOS)
        found = found[1:-1]
    assert found in [text[start : start + len(found)] for start in range(len(text) + 1)]
    assert found.count(MASK) == text.count(MASK)
    if len(found) == len(text) or not blanks:
        return
    left, right = found.index(blanks[0]), len(found) - found.index(blanks[0]) - len(blanks)
    if side == "left":
        assert right == behind or left == 0
    elif side == "right":
        assert left == before or right == 0
    else:
        assert abs(left - right) <= 1 or (left == before and left < right) or (right == behind and right < left)


@pytest.mark.parametrize("side", SIDES)
def test_a_prompt_that_is_cut_is_answered_and_its_text_stays_whole(own_tokenizer, side):  # noqa: F811
    model = small_model(vocab_size=own_tokenizer.padded_vocab_size())

    def filler(**options):
        return BlankFiller(own_tokenizer, BlankGenerator(model, own_tokenizer.special, max_len=4, **options))

    prompt = "fox " * 90 + "the [MASK] dog " + "lazy " * 90
    with pytest.raises(UserError, match="tokens long, but the model has positions for 65"):
        filler().fill([prompt])
    result = filler(truncate=side).fill([prompt])[0]
    assert result.text.startswith("fox " * 90 + "the ")
    assert result.text.endswith(" dog" + " lazy" * 90)
    context = filler(truncate=side).encode(prompt).context
    assert len(context) == 65
    assert context[0] == own_tokenizer.special.cls
    assert context[-1] == own_tokenizer.special.eos
    whole = own_tokenizer.encode(prompt.strip(), command_tokens=True)
    at, place = whole.index(own_tokenizer.special.mask), context.index(own_tokenizer.special.mask)
    start = {"left": len(whole) - 63, "right": 0, "middle": at - 31}[side]
    if side == "left":
        start = min(start, at)
    elif side == "right":
        start = max(0, at + 1 - 63)
    assert context[1:-1] == whole[start : start + 63]
    assert context[place] == own_tokenizer.special.mask
    far = "[MASK] " + "fox " * 90 + "[MASK]"
    with pytest.raises(UserError, match="bring the blanks closer together"):
        filler(truncate=side).fill([far])
    scored = filler(truncate=side).score([prompt], [["quick"]])
    assert len(scored[0][0].token_logprobs) > 1
    written_back = filler(truncate=side, reencode=True)
    assert len(written_back.encode("the [MASK] [MASK] [MASK] " + "lazy " * 90).context) == 65 - 2 * 3


def test_a_hundred_thousand_characters_are_cut(own_tokenizer):  # noqa: F811
    model = small_model(vocab_size=own_tokenizer.padded_vocab_size())
    filler = BlankFiller(own_tokenizer, BlankGenerator(model, own_tokenizer.special, max_len=4, truncate="left"))
    result = filler.fill(["fox " * 25_000])[0]
    assert result.text.startswith("fox fox")
    assert len(result.answers) == 1


def test_a_side_that_is_none_is_refused():
    assert mistakes(FillConfig(truncate="up")) == ["truncate is 'up'; it must be one of error, left, right, middle"]
