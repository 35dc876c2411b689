"""Greedy filling equals what the original GLM code computed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from ftk.tasks.glm_blank import BlankGenerator
from tests.golden_glm import GOLDEN, read_model

FILLED = json.loads((GOLDEN / "greedy_fill.json").read_text())
CASES = FILLED["cases"]


@pytest.fixture(scope="module")
def model():
    return read_model().eval()


SPECIAL = SimpleNamespace(sop=FILLED["sop"], eop=FILLED["eop"], mask=FILLED["mask"])


def assert_equals_golden(answers, case, atol):
    assert [answer.tokens for answer in answers] == case["answers"]
    for answer, expected in zip(answers, case["token_logprobs"], strict=True):
        np.testing.assert_allclose(answer.token_logprobs, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_each_context_alone_gives_the_original_answers(model, case):
    (answers,) = BlankGenerator(model, SPECIAL, beam=1, max_len=FILLED["max_len"]).fill_ids([case["context"]])
    assert_equals_golden(answers, case, 1e-4)


def test_all_contexts_in_one_batch_give_the_original_answers(model):
    generator = BlankGenerator(model, SPECIAL, beam=1, max_len=FILLED["max_len"])
    for answers, case in zip(generator.fill_ids([case["context"] for case in CASES]), CASES, strict=True):
        assert_equals_golden(answers, case, 1e-4)
