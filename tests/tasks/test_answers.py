"""Questions with one answer: what is learned of a sample is what scoring finds for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ftk.data.batches.collate import Collater
from ftk.errors import UserError
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.request import EXPECTED, Request
from ftk.generation.engine.scoring import score
from ftk.generation.engine.source_to_target import SourceToTarget
from ftk.models import build_model
from ftk.registry import MODELS
from ftk.tasks.answers import answer_sample, usual_task
from ftk.tasks.glm_blank.infill.framing import BlankFraming
from ftk.tokenizers import SpecialTokens

SPECIAL = SpecialTokens(cls=1, eos=2, pad=0, mask=3, smask=4, gmask=5, sop=6, eop=7)
SHAPE = {"vocab_size": 32, "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
BEFORE, BEHIND, ANSWERS = [10, 11, 12, 13], [14, 15], [[20, 21, 22], [23]]
FRAMINGS: dict[str, Any] = {
    "glm": lambda model: BlankFraming(SPECIAL, model.config),
    "gpt2": lambda model: Continuation([2], 64, begins=[1]),
    "llama": lambda model: Continuation([2], 64),
    "t5": lambda model: SourceToTarget([2], [0], around=([], [2])),
}


def made(name: str) -> tuple[Any, Any]:
    model = build_model(name, **SHAPE).eval()
    return model, FRAMINGS[name](model)


def losses(model: Any, samples: list[dict[str, Any]]) -> list[float]:
    """The loss of each sample, of all in one batch."""
    batch = Collater(SPECIAL)(samples)
    with torch.no_grad():
        hidden = model.hidden_states(**batch.inputs)
        logits = model.head(hidden.flatten(0, 1)[batch.places])  # [N, V]
    each = F.cross_entropy(logits, batch.targets, reduction="none")
    rows = batch.places // batch.placed_tokens.size(1)
    return [float(each[rows == row].sum()) for row in range(len(samples))]


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("name", FRAMINGS)
def test_the_loss_of_a_sample_is_its_score(name: str, end: bool) -> None:
    model, framing = made(name)
    prompts = [framing.ask(BEFORE, (), expected) for expected in EXPECTED]
    prompts += [framing.ask(BEFORE, BEHIND)] if name == "glm" else []
    answers = [[*answer, *framing.ends[: int(end)]] for answer in ANSWERS]
    samples = [answer_sample(framing, prompt, answer) for prompt in prompts for answer in answers]
    given = [[framing.continuation(answer) for answer in answers]] * len(prompts)
    scored = score(model, framing, [Request(prompt) for prompt in prompts], given)
    expected = [-sum(one.logprobs) for row in scored for one in row]
    assert losses(model, samples) == pytest.approx(expected, rel=1e-5)
    counts = [int(sample["loss_mask"].sum()) for sample in samples]
    assert counts == [len(answer) for _ in prompts for answer in answers]


@pytest.mark.parametrize("name", FRAMINGS)
def test_no_target_but_those_of_the_answer_changes_the_loss(name: str) -> None:
    torch.manual_seed(1)
    model, framing = made(name)
    sample = answer_sample(framing, framing.ask(BEFORE, (), "text"), [*ANSWERS[0], *framing.ends[:1]])
    targets, learned = sample["targets"], sample["loss_mask"]
    (found,) = losses(model, [sample])
    assert losses(model, [{**sample, "targets": np.where(learned, targets, 9)}]) == [found]
    for place in np.flatnonzero(learned):
        other = targets.copy()
        other[place] = 9
        assert losses(model, [{**sample, "targets": other}])[0] != pytest.approx(found, rel=1e-6)


def test_a_blank_is_asked_by_the_mask_of_its_length_between_the_ends_of_a_text() -> None:
    framing = made("glm")[1]
    contexts = [framing.ask([10], [11], expected).context for expected in EXPECTED]
    assert contexts == [[1, 10, 3, 11, 2], [1, 10, 4, 11, 2], [1, 10, 5, 11, 2]]
    assert framing.ask([10], (), "text").context == [1, 10, 5]
    only_masks = BlankFraming(SpecialTokens(mask=3, sop=6, eop=7))
    assert only_masks.ask([10], (), "text").context == [10, 3]


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_what_reads_nothing_behind_an_answer_says_so(name: str) -> None:
    with pytest.raises(UserError, match="the place of the answer at the end"):
        made(name)[1].ask(BEFORE, BEHIND)


def test_a_model_is_asked_as_its_usual_task_asks() -> None:
    for name, task in (("glm", "glm_blank"), ("gpt2", "causal_lm"), ("t5", "span_corruption")):
        model, _ = made(name)
        assert usual_task(model.config).__module__.startswith(f"ftk.tasks.{task}")
        assert MODELS.of_config(model.config).name == name
