"""The layouts that users of the Hugging Face GLM know from its tokenizer, written out from its description by hand.

build_inputs_for_generation: [CLS] text [MASK] text <eos> | <sop> answer, learned with the end of piece behind it.
build_inputs_for_multiple_choice: the same text once, behind it every choice, none of which sees another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ftk.generation.engine import scoring
from ftk.generation.engine.request import Request
from ftk.tasks.answers import answer_sample
from ftk.tasks.glm_blank.infill.framing import BlankFraming
from ftk.tokenizers import SpecialTokens
from tests.generation.slow import small_model

CLS, SOP, EOP, MASK, EOS = 0, 1, 2, 3, 6
SPECIAL = SpecialTokens(cls=CLS, eos=EOS, mask=MASK, smask=4, gmask=5, sop=SOP, eop=EOP)
CONTEXT = [CLS, 10, 11, MASK, 12, EOS]
PLACE = CONTEXT.index(MASK)
CHOICES = [[14, 15, 16], [17]]


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


def test_a_learned_answer_is_build_inputs_for_generation(model) -> None:
    framing, target = BlankFraming(SPECIAL, model.config), [14, 15, 16]
    sample = answer_sample(framing, framing.ask([10, 11], [12]), [*target, EOP])
    length = len(CONTEXT)
    assert sample["tokens"].tolist() == [*CONTEXT, SOP, *target]
    assert sample["position_ids"].tolist() == [[*range(length), *([PLACE] * 4)], [*([0] * length), 1, 2, 3, 4]]
    labels = np.where(sample["loss_mask"], sample["targets"], -100)
    assert labels.tolist() == [*([-100] * length), *target, EOP]
    assert sample["context_length"] == length  # all see the context, the answer what came before


def test_what_is_read_for_an_answer_is_build_inputs_for_generation_without_targets(model) -> None:
    framing = BlankFraming(SPECIAL, model.config)
    frame = framing.first(Request(framing.ask([10, 11], [12])))
    assert [*frame.tokens] == [*CONTEXT, SOP]
    assert frame.inputs["position_ids"].tolist() == [[*range(6), PLACE], [*([0] * 6), 1]]
    assert frame.stride["position_ids"].tolist() == [0, 1]  # of each further token


def test_scored_candidates_are_build_inputs_for_multiple_choice(model, monkeypatch) -> None:
    framing, read = BlankFraming(SPECIAL, model.config), []
    compute = scoring.final_hidden_states

    def spy(model, tokens, inputs, visibility, *others):
        read.append((tokens, inputs["position_ids"], visibility))
        return compute(model, tokens, inputs, visibility, *others)

    monkeypatch.setattr(scoring, "final_hidden_states", spy)
    given = [framing.continuation(choice) for choice in CHOICES]
    scoring.score(model, framing, [Request(framing.ask([10, 11], [12]))], [given])
    ((tokens, positions, visibility),) = read
    assert tokens.tolist() == [[*CONTEXT, SOP, 14, 15, SOP]]
    assert positions.tolist() == [[[*range(6), *([PLACE] * 4)], [*([0] * 6), 1, 2, 3, 1]]]
    seen = torch.zeros(10, 10, dtype=torch.bool)
    seen[:, :6] = True
    seen[6:9, 6:9] = torch.ones(3, 3).tril().bool()
    seen[9, 9] = True
    places = torch.arange(10)
    assert torch.equal(visibility.boolean(places, places).reshape(10, 10), seen)
