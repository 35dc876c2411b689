"""build_sample against the original's results, and against a slow, obviously right version."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.tasks.glm_blank.samples.infilling import build_sample, mask_token

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "block_samples.json").read_text())
SPECIAL = SimpleNamespace(pad=90, eos=90, cls=91, mask=92, smask=93, gmask=94, sop=95, eop=96, unk=97, dblock=98)
TOKEN, SENTENCE, DOCUMENT = 0, 1, 2
THEIR_NAMES = {"bert": "token", "gap_sentence": "sentence", "generation": "document"}


def slow_sample(
    document,
    spans,
    answer_order,
    mask,
    *,
    block_positions=True,
    append_end=True,
    position_offset=0,
    answer_position=None,
    sentinels=(),
):
    """The sample as plain lists, token by token: (tokens, targets, loss_mask, positions, block positions)."""
    starts = dict(spans)
    masks, sops = {}, {}
    for number, (start, _) in enumerate(answer_order):
        masks[start] = sentinels[number - 1][0] if sentinels and number else mask
        sops[start] = sentinels[number - 1][1] if sentinels and number else SPECIAL.sop
    rows = []  # input, target, loss, position, block position
    blank_places = {}
    place = 0
    while place < len(document):
        where = len(rows) + position_offset
        if place in starts:
            blank_places[place] = where
            rows.append((masks[place], masks[place], False, where, 0))
            place = starts[place]
        else:
            rows.append((document[place], document[place], False, where, 0))
            place += 1
    for start, end in answer_order:
        answer = list(document[start:end])
        inputs = [sops[start], *answer]
        targets = [*answer, SPECIAL.eop]
        if not append_end:
            inputs, targets = inputs[:-1], targets[:-1]
        where = blank_places[start] if answer_position is None else answer_position
        for step, (token, target) in enumerate(zip(inputs, targets, strict=True)):
            rows.append((token, target, True, where, step + 1 if block_positions else 1))
    return [list(column) for column in zip(*rows, strict=True)]


def as_lists(sample):
    return [
        sample.tokens.tolist(),
        sample.targets.tolist(),
        sample.loss_mask.tolist(),
        sample.position_ids[0].tolist(),
        sample.position_ids[1].tolist(),
    ]


@pytest.mark.parametrize("number", range(len(GOLDEN["cases"])))
def test_equal_to_the_original(number):
    case, ids = GOLDEN["cases"][number], GOLDEN["ids"]
    special = SimpleNamespace(
        pad=ids["eos"],
        eos=ids["eos"],
        cls=ids["ENC"],
        mask=ids["MASK"],
        smask=ids["sMASK"],
        gmask=ids["gMASK"],
        sop=ids["sop"],
        eop=ids["eop"],
    )
    sample = build_sample(
        case["document"],
        case["spans"],
        case["answer_order"],
        objective=THEIR_NAMES[case["task"]],
        special=special,
        block_positions=case["block_position_encoding"],
    )
    assert sample.tokens.tolist() == case["tokens"]
    assert sample.targets.tolist() == case["targets"]
    assert sample.loss_mask.astype(int).tolist() == case["loss_mask"]
    assert sample.position_ids.tolist() == case["position_ids"]
    assert sample.context_length == case["context_length"]
    assert sample.tokens.dtype == sample.targets.dtype == sample.position_ids.dtype == np.int64
    assert sample.loss_mask.dtype == np.bool_


@pytest.mark.parametrize(
    ("document", "spans", "answer_order"),
    [
        pytest.param([91, 1, 2, 3, 90], [[1, 4]], [[1, 4]], id="all the text"),
        pytest.param([1, 2, 3], [[0, 3]], [[0, 3]], id="every token"),
        pytest.param([1, 2, 3, 4], [[0, 1]], [[0, 1]], id="first token"),
        pytest.param([1, 2, 3, 4], [[3, 4]], [[3, 4]], id="last token"),
        pytest.param([1, 2, 3, 4], [[0, 2], [2, 4]], [[2, 4], [0, 2]], id="touching, both ends"),
        pytest.param([1, 2, 3, 4, 5], [[1, 2], [2, 3], [3, 5]], [[2, 3], [3, 5], [1, 2]], id="three touching"),
        pytest.param(
            [91, 1, 2, 90, 91, 3, 4, 90, 91, 5],
            [[1, 2], [5, 7], [9, 10]],
            [[9, 10], [1, 2], [5, 7]],
            id="several documents",
        ),
        pytest.param([1, 2, 3], [], [], id="no blank"),
    ],
)
@pytest.mark.parametrize("block_positions", [True, False])
@pytest.mark.parametrize("append_end", [True, False])
def test_edges_equal_the_slow_version(document, spans, answer_order, block_positions, append_end):
    sample = build_sample(
        document, spans, answer_order, special=SPECIAL, block_positions=block_positions, append_end=append_end
    )
    assert as_lists(sample) == slow_sample(
        document, spans, answer_order, SPECIAL.mask, block_positions=block_positions, append_end=append_end
    )
    assert sample.context_length == len(document) - sum(end - start for start, end in spans) + len(spans)


@st.composite
def blanked_documents(draw):
    document = draw(st.lists(st.integers(0, 80), min_size=1, max_size=60))
    cuts = sorted(draw(st.sets(st.integers(0, len(document)), max_size=20)))
    pieces = list(zip(cuts, cuts[1:], strict=False))
    spans = [piece for piece in pieces if draw(st.booleans())]
    return document, spans, draw(st.permutations(spans))


@given(
    blanked_documents(),
    st.sampled_from([TOKEN, SENTENCE, DOCUMENT]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
    st.sampled_from([None, 64]),
)
@settings(max_examples=300, deadline=None)
def test_any_blanks_equal_the_slow_version(
    blanks, objective, block_positions, append_end, numbered, position_offset, answer_position
):
    document, spans, answer_order = blanks
    options = {
        "block_positions": block_positions,
        "append_end": append_end,
        "position_offset": position_offset,
        "answer_position": answer_position,
    }
    sentinels = [(200 + 2 * number, 201 + 2 * number) for number in range(20)] if numbered else []
    name = ("token", "sentence", "document")[objective]
    sample = build_sample(
        document, spans[::-1], answer_order, objective=name, special=SPECIAL, sentinels=sentinels, **options
    )
    mask = (SPECIAL.mask, SPECIAL.smask, SPECIAL.gmask)[objective]
    if objective != TOKEN:  # the numbered masks are the token objective's
        sentinels = [(mask, start) for _, start in sentinels]
    expected = slow_sample(document, spans, answer_order, mask, sentinels=sentinels, **options)
    assert as_lists(sample) == expected
    assert sample.objective == objective


def test_without_task_masks_every_objective_has_the_plain_mask():
    special = SimpleNamespace(**{**vars(SPECIAL), "smask": None, "gmask": None})
    assert [mask_token(special, objective) for objective in (TOKEN, SENTENCE, DOCUMENT)] == [SPECIAL.mask] * 3
    assert [mask_token(SPECIAL, objective) for objective in (TOKEN, SENTENCE, DOCUMENT)] == [92, 93, 94]


def test_a_suffix_may_end_in_the_end_of_the_document():
    sample = build_sample([91, 1, 2, 3, 90], [[3, 5]], [[3, 5]], "document", special=SPECIAL, append_end=False)
    assert sample.tokens.tolist() == [91, 1, 2, SPECIAL.gmask, SPECIAL.sop, 3]
    assert sample.targets.tolist() == [91, 1, 2, SPECIAL.gmask, 3, 90]


@pytest.mark.parametrize(
    ("spans", "answer_order", "message"),
    [
        ([[1, 1]], [[1, 1]], "empty or outside"),
        ([[2, 1]], [[2, 1]], "empty or outside"),
        ([[-1, 2]], [[-1, 2]], "empty or outside"),
        ([[3, 9]], [[3, 9]], "empty or outside"),
        ([[1, 3], [2, 4]], [[1, 3], [2, 4]], "overlaps"),
        ([[1, 2]], [[2, 3]], "not an order"),
        ([[1, 2]], [[1, 2], [3, 4]], "not an order"),
        ([[4, 7]], [[4, 7]], "end of document"),
    ],
)
def test_wrong_spans_are_refused(spans, answer_order, message):
    with pytest.raises(ValueError, match=message):
        build_sample([91, 1, 2, 3, 4, 90, 5, 6], spans, answer_order, special=SPECIAL)


def test_unknown_objective_and_missing_sentinels_are_refused():
    with pytest.raises(ValueError, match="objective is 'masked'"):
        build_sample([1, 2], [[0, 1]], [[0, 1]], "masked", special=SPECIAL)
    with pytest.raises(ValueError, match="3 spans need 2 sentinels"):
        build_sample(
            [1, 2, 3], [[0, 1], [1, 2], [2, 3]], [[0, 1], [1, 2], [2, 3]], special=SPECIAL, sentinels=[(200, 201)]
        )
