"""What looks like a blank and is none is refused with its spelling and place; other text in brackets is text."""

from __future__ import annotations

import pytest

from ftk.errors import UserError
from ftk.tasks.glm_blank.infill.misspelt_blanks import refuse_misspelt_blanks

BLANKS = ["[MASK]", "[sMASK]", "[gMASK]"]

MISSPELT = {
    "[MASK]": "[mask] [Mask] [mAsK] <mask> <MASK> <|mask|> {mask} {{mask}} (MASK) [MASK1] [MASK_2] [MASK-3] \\[MASK\\]"
    " [**MASK**] [MASK) 【MASK】 【mask】 ［MASK］ ［MASK] （MASK）"
    " 《MASK》 〔mask〕 ＜mask＞ [ＭＡＳＫ] [\u200bMASK]",
    "[sMASK]": "[smask] [SMASK] [sMaSK] 【sMASK】 <smask>",
    "[gMASK]": "[gmask] [GMASK] [gmASK] ［gMASK］ (gMASK) <|gmask|>",
}
ORDINARY = """[1] [12] [Note] [FOO] [] <b> </s> <mask id=3> (mask) (masks) (mask?) [masks] [masked] [TASK] [MARK] [ASK]
[MASKS]
[S] [UNK] [MASK MASK] (the_MASK) 【注】 【面具】 （口罩） 《面具》 ［注释］ ［１］ 〔二〕 「mask」 [aMASKa] {x} {} <>
data[mask] f(x)[mask] row_1[mask] [MAS] [SMASH] ${UMASK}"""


@pytest.mark.parametrize(("word", "meant"), [(word, name) for name in MISSPELT for word in MISSPELT[name].split()])
@pytest.mark.parametrize("text", ["a {} fox", "{}", "他在{}工作。", "at [MASK] in {} ."])
def test_a_misspelt_blank_is_named_with_its_place_and_the_right_spelling(word, meant, text):
    with pytest.raises(UserError) as caught:
        refuse_misspelt_blanks(text.format(word), BLANKS, BLANKS)
    shown, _, remedy = str(caught.value).partition(" is not a blank; ")
    assert remedy == (
        f"write {meant} (this tokenizer has [MASK], [sMASK], [gMASK]), "
        "or have it read as text with `misspelt_blanks` text"
    )
    whole, begin = text.format(word), int(shown.split()[-1]) - 1
    assert text.index("{}") <= begin < text.index("{}") + len(word)
    assert f"{whole[begin:]!r}".startswith(shown.split("' at")[0])


@pytest.mark.parametrize(
    "word", ["[ MASK ]", "[MASK ]", "[ mask]", "[\u3000MASK]", "[M A S K]", "[gMASK\n]", "[MASK 2]"]
)
def test_spaces_in_it_do_not_hide_it(word):
    with pytest.raises(UserError, match="is not a blank; write"):
        refuse_misspelt_blanks(f"the {word} fox", BLANKS, BLANKS)


@pytest.mark.parametrize(
    "word", [*ORDINARY.split(), *BLANKS, "[[MASK]]", "([MASK])", "[MASK", "MASK]", "the (mask) she wore"]
)
def test_ordinary_text_in_brackets_and_blanks_are_left_alone(word):
    refuse_misspelt_blanks(f"the {word} fox", BLANKS, BLANKS)
    refuse_misspelt_blanks(word, BLANKS, BLANKS)
    refuse_misspelt_blanks(word * 50, BLANKS, BLANKS)


def test_what_the_tokenizer_lacks_is_not_recommended_and_its_own_names_are_no_mistakes():
    with pytest.raises(UserError, match=r"'\[gmask\]' at character 1 is not a blank; this tokenizer has \[MASK\], or "):
        refuse_misspelt_blanks("[gmask]", ["[MASK]"], ["[MASK]"])
    refuse_misspelt_blanks("<mask> [mask]", ["<mask>", "[mask]", "[MASK]"], ["[MASK]"])
