"""From the original's samples back to questions: contexts with the answers in the order of their blanks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ftk.tasks.glm_blank.infill.questions import question_of

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "block_samples.json").read_text())
SPECIAL = SimpleNamespace(sop=50257, eop=50258, mask=50260, gmask=50263, smask=50264)


@pytest.mark.parametrize("index", range(len(GOLDEN["cases"])))
@pytest.mark.parametrize("padding", [0, 5])
def test_references_are_the_documents_own_spans_from_left_to_right(index, padding):
    case = GOLDEN["cases"][index]
    sample = {
        "tokens": np.pad(case["tokens"], (0, padding)),
        "targets": np.pad(case["targets"], (0, padding)),
        "loss_mask": np.pad(case["loss_mask"], (0, padding)).astype(bool),
        "position_ids": np.pad(case["position_ids"], ((0, 0), (0, padding))),
        "context_length": case["context_length"],
    }
    question = question_of(sample, SPECIAL)
    assert question.context == case["tokens"][: case["context_length"]]
    spans = sorted(case["spans"])
    assert question.references == [case["document"][start:end] for start, end in spans]
    ends = SPECIAL.eop in case["targets"][case["context_length"] :]
    assert question.ended == [ends] * len(spans)
    starts = [
        place for place, token in zip(case["position_ids"][0], case["tokens"], strict=True) if token == SPECIAL.sop
    ]
    assert question.order == [sorted(starts).index(start) for start in starts]
